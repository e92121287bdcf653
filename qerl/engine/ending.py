"""The rules by which a sequence ends, and what it has drawn until then."""

import math
from typing import Any, Literal

from qerl.engine.look import Drawn
from qerl.engine.sequence import Sequence
from qerl.records import Completion, Request, Sampling

Reason = Literal["stop", "length"]


class Ending:
    """What every sequence of a call has drawn, and which have ended since it was last asked."""

    def __init__(self, sampling: Sampling, tokenizer: Any, version: int, noise_version: int) -> None:
        self.sampling, self.tokenizer = sampling, tokenizer
        self.version, self.noise_id = version, noise_version if sampling.noise else None
        self.stop_ids = frozenset(sampling.stop_ids)
        self._logprobs: dict[Sequence, tuple[list[float], list[float]]] = {}  # as drawn, before filters
        self._ended: list[tuple[Sequence, Reason]] = []
        # A stop string ends at the last token: only so many of them can hold it (a character may take four).
        self.tail = 16 + 4 * max(map(len, sampling.stop), default=0)

    def keep(self, drawn: dict[Sequence, Drawn], has_nan: bool) -> dict[Sequence, list[int]]:
        """Each sequence's tokens up to its end; what was drawn past it is dropped. has_nan: NaN may be among them."""
        kept: dict[Sequence, list[int]] = {}
        for sequence, (tokens, logprobs, policy) in drawn.items():
            count, reason = self._end(sequence, tokens)
            if count < len(tokens):
                tokens, logprobs, policy = tokens[:count], logprobs[:count], policy[:count]
            if has_nan and any(map(math.isnan, logprobs)):
                raise ValueError("The model gives NaN logits: its weights, adapter or noise are not finite.")
            before = self._logprobs.get(sequence)
            if before is None:
                self._logprobs[sequence] = logprobs, policy
            else:
                before[0].extend(logprobs)
                before[1].extend(policy)
            if reason is not None:
                self._ended.append((sequence, reason))
            kept[sequence] = tokens
        return kept

    def ended(self) -> list[tuple[Sequence, Reason]]:
        """The sequences that have ended since the last call, and why."""
        ended, self._ended = self._ended, []
        return ended

    def completion(self, sequence: Sequence, reason: Reason) -> Completion:
        text = self._decode(sequence.output)
        logprobs, policy = self._logprobs.pop(sequence)
        return Completion(
            request=sequence.request,
            sample=sequence.sample,
            token_ids=tuple(sequence.output),
            text=text[: self._cut(text)],
            logprobs=tuple(logprobs),
            policy_logprobs=tuple(policy),
            finish_reason=reason,
            policy_version=self.version,
            noise_id=self.noise_id,
        )

    def refusal(self, request: Request, sample: int, why: str) -> Completion:
        return Completion(request.id, sample, (), "", (), (), "refused", self.version, self.noise_id, why)

    def _end(self, sequence: Sequence, tokens: list[int]) -> tuple[int, Reason | None]:
        """How many of the tokens count, and why the sequence ends after them, if it does."""
        left = sequence.remaining
        if self.sampling.stop or not self.stop_ids.isdisjoint(tokens):
            for i, token in enumerate(tokens[:left]):
                if token in self.stop_ids or self._has_stop(sequence, tokens[: i + 1]):
                    return i + 1, "stop"
        return (left, "length") if len(tokens) >= left else (len(tokens), None)

    def _has_stop(self, sequence: Sequence, new: list[int]) -> bool:
        if not self.sampling.stop or len(sequence.output) + len(new) < self.sampling.min_tokens:
            return False
        tail = self._decode([*sequence.output[-self.tail :], *new][-self.tail :])
        if not any(stop in tail for stop in self.sampling.stop):
            return False
        return self._cut(self._decode([*sequence.output, *new])) is not None

    def _decode(self, tokens: list[int]) -> str:
        text: str = "" if self.tokenizer is None else self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _cut(self, text: str) -> int | None:
        """Where the first stop string begins."""
        return min((at for stop in self.sampling.stop if (at := text.find(stop)) >= 0), default=None)
