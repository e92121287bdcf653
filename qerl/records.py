"""What stages hand to each other, and who samples.

Dimensions in names: P prompts, G samples of a group, T packed tokens, D hidden, V vocabulary, S sequences.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class Request:
    """A prompt to be continued `samples` times. `id` names it for the random numbers, whatever batch it is in."""

    id: int
    prompt_ids: tuple[int, ...]
    samples: int = 1

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"Request {self.id} asks for {self.samples} samples; at least 1.")


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, and when a sample ends."""

    max_tokens: int
    temperature: float = 1.0  # 0: greedy, with log-probs at temperature 1
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0  # no end before that many
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()  # strings; the text ends before the first of them
    seed: int = 0
    rollout: int = 0  # the same prompts draw other tokens in another rollout
    noise: bool = False  # whether the model's noise applies

    def __post_init__(self) -> None:
        checks = {
            "max_tokens must be at least 1": self.max_tokens >= 1,
            "temperature must be 0 (greedy) or at least 0.001": self.temperature == 0 or self.temperature >= 1e-3,
            "top_k must be 0 (off) or more": self.top_k >= 0,
            "top_p must be above 0 and at most 1": 0 < self.top_p <= 1,
            "min_p must be from 0 to 1": 0 <= self.min_p <= 1,
            "repetition_penalty must be above 0": self.repetition_penalty > 0,
            "stop must be a tuple of strings, none of them empty": not isinstance(self.stop, str) and all(self.stop),
            "min_tokens must be from 0 to max_tokens": 0 <= self.min_tokens <= self.max_tokens,
        }
        for rule, holds in checks.items():
            if not holds:
                raise ValueError(f"{rule}.")


def require_temperature(temperature: float, top_p: float, top_k: int, min_p: float) -> None:
    """For commands: who asks for filters means to sample."""
    if temperature == 0 and (top_p, top_k, min_p) != (1.0, 0, 0.0):
        raise ValueError("At temperature 0 the likeliest token is taken, whatever the filters: give a temperature too.")


@dataclass(frozen=True)
class Completion:
    """One sample, as it was drawn. Training uses these ids; nothing is tokenized again."""

    request: int
    sample: int
    token_ids: tuple[int, ...]
    text: str  # of the tokens, without special ones; empty where the sampler has no tokenizer
    logprobs: tuple[float, ...]  # under the distribution that each token was drawn from, filters included
    policy_logprobs: tuple[float, ...]  # under the temperature-scaled policy before filters
    finish_reason: Literal["stop", "length", "refused"]
    policy_version: int
    noise_id: int | None = None  # which draw of noise applied; None: clean
    error: str = ""  # why the request was refused; there are no tokens then


class Sampler(Protocol):
    """Whatever continues prompts: our engine, or another behind the same calls."""

    policy_version: int

    def generate(self, requests: Iterable[Request], sampling: Sampling) -> list[Completion]:
        """All completions, in the order of requests and samples; a request that can't be served gives refused ones."""

    def stream(self, requests: Iterable[Request], sampling: Sampling) -> Iterator[Completion]:
        """Each completion as it ends."""

    def on_policy_update(self) -> None:
        """The policy has changed: count its version up, reuse nothing of the old one."""

    def sleep(self) -> None:
        """Give memory to the trainer until `wake`."""

    def wake(self) -> None:
        """Be ready to sample; nothing where it is awake."""
