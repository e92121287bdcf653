"""What watches over a run: Ctrl-C at the right moment, signs of collapse, and a trial of the worst case before step
1."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

import torch

from qerl.config import Config
from qerl.rl.batch import TrainSample
from qerl.rl.sizes import OPTIMIZER_BYTES, largest_micro_batch, longest_groups, longest_sequence
from qerl.rl.update import Tally, Updater

BEGINNING = 5  # steps that a run is compared with
ENTROPY_FLOOR, REWARD_FALL, LENGTH_FALL, CLIPPED = 0.1, 0.5, 0.25, 0.9
SOLVED = 0.9  # an accuracy at which low entropy is no alarm


class Interrupts:
    """Inside, Ctrl-C and SIGTERM raise KeyboardInterrupt; under `shield` only once the work there is done.

    A second one breaks that work off: `broken` is then True, and what it was changing must not be saved. several: this
    is one of several processes, which stop together: then they raise within `own_work` only.
    """

    def __init__(self, say: Callable[[str], None] = lambda text: None, several: bool = False) -> None:
        self.say, self.several = say, several
        self.broken = False
        self._shielded, self._asked, self._own, self._changing = "", False, False, False

    def __enter__(self) -> "Interrupts":
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if (self._shielded or (self.several and not self._own)) and not self._asked:
            self._asked = True
            self.say(f"Stopping once {self._shielded or 'all ranks can'}; again to break it off.")
            return
        raise KeyboardInterrupt

    @contextmanager
    def shield(self, until: str) -> Iterator[None]:
        """What is inside is finished first. until: in words, such as "the update is done"."""
        self._shielded, self._changing = until, True
        try:
            yield
        except BaseException:
            self.broken |= self._changing
            raise
        finally:
            self._shielded = ""
        if self._asked and not self.several:
            self._asked = False
            raise KeyboardInterrupt

    def settled(self) -> None:
        """Within a shield: what was changed there is whole again, and may be saved whatever comes."""
        self._changing = False

    @contextmanager
    def own_work(self) -> Iterator[None]:
        """What one of several processes does between two meetings: it stops here, and the others hear of it there."""
        try:
            self._own = True
            if self._asked:
                self._asked = False
                raise KeyboardInterrupt
            yield
        finally:
            self._own = False


class CollapseWatch:
    """Warns, once each, when entropy, reward or length leave where the run began. `seen` is saved with a checkpoint."""

    def __init__(self, seen: dict[str, float] | None = None) -> None:
        self.seen = seen if seen is not None else {}

    def check(self, step: int, metrics: dict[str, Any]) -> list[str]:
        entropy, reward = metrics["entropy"], metrics["reward"]
        length, clipped = metrics["completions/mean_length"], metrics["completions/clipped_ratio"]
        if not all(map(math.isfinite, (entropy, reward, length))):
            return []
        smooth = 0.8 * self.seen.get("reward", reward) + 0.2 * reward
        self.seen["reward"], self.seen["best"] = smooth, max(self.seen.get("best", -math.inf), smooth)
        count = self.seen["count"] = self.seen.get("count", 0) + 1
        if count <= BEGINNING:  # means over the first steps that trained
            for name, value in (("entropy", entropy), ("length", length)):
                self.seen[name] = self.seen.get(name, 0.0) + (value - self.seen.get(name, 0.0)) / count
            return []
        best, entropy_then, length_then = self.seen["best"], self.seen["entropy"], self.seen["length"]
        signs = (
            (
                entropy < ENTROPY_FLOOR * entropy_then and metrics.get("accuracy", 0.0) < SOLVED,
                f"entropy fell to {entropy:.3f}, from {entropy_then:.3f} at the start: the policy hardly explores. "
                "Try more noise (noise.schedule=entropy) or a lower learning_rate.",
            ),
            (
                best > 0 and smooth < REWARD_FALL * best,
                f"the reward fell to {smooth:.3f} from {best:.3f}: the policy may be collapsing. Lower learning_rate.",
            ),
            (
                length < LENGTH_FALL * length_then,
                f"completions shrank to {length:.0f} tokens, from {length_then:.0f} at the start.",
            ),
            (clipped > CLIPPED, f"{clipped:.0%} of the completions are cut off. Raise max_completion_length."),
        )
        found = []
        for i, (holds, text) in enumerate(signs):
            if holds and not self.seen.get(f"warned {i}"):
                self.seen[f"warned {i}"] = 1.0
                found.append(f"Step {step}: {text}")
        return found


def preflight(config: Config, updater: Updater, say: Callable[[str], None]) -> dict[str, float]:
    """One micro-batch of the largest shape, forward and backward, nothing changed, with room kept for what the
    optimizer will hold. Returns tokens, seconds and, on a GPU, peak GB; what does not fit is refused with what
    would. On a CPU, where it would take minutes and nothing is refused, one sequence of the largest length."""
    model = updater.model
    longest = longest_sequence(config)
    tokens = largest_micro_batch(config) if model.device.type == "cuda" else longest
    say(f"Trying {'the largest micro-batch' if tokens > longest else 'the longest sequence'}, {tokens} tokens ...")
    if model.device.type != "cuda":
        started = time.monotonic()
        _try(config, updater, tokens)
        return {"tokens": float(tokens), "seconds": time.monotonic() - started}
    held = torch.empty(optimizer_bytes(config, updater), dtype=torch.uint8, device=model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    started = time.monotonic()
    try:
        _try_harder(config, updater, tokens, say)
    except torch.OutOfMemoryError as error:
        updater.optimizer.zero_grad(set_to_none=True)
        raise ValueError(_what_fits(config, updater, tokens, longest)) from error
    seconds, peak = time.monotonic() - started, torch.cuda.max_memory_allocated(model.device) / 1e9
    del held
    torch.cuda.empty_cache()
    return {"tokens": float(tokens), "seconds": seconds, "peak_gb": peak}


def optimizer_bytes(config: Config, updater: Updater) -> int:
    """What AdamW will hold."""
    weights: int = sum(p.numel() for p in updater.parameters)
    return weights * OPTIMIZER_BYTES[config.optim]


def _try_harder(config: Config, updater: Updater, tokens: int, say: Callable[[str], None]) -> None:
    """Where too few blocks were to be recomputed, all are from now on."""
    layers = updater.model.arch.layers
    try:
        _try(config, updater, tokens)
        return
    except torch.OutOfMemoryError:
        if config.recompute != "auto" or updater.recompute >= layers:
            raise
    say(f"Recomputing {updater.recompute} of {layers} blocks, as planned, takes too much memory: recomputing all.")
    updater.optimizer.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    updater.recompute = layers
    _try(config, updater, tokens)


def _try(config: Config, updater: Updater, tokens: int) -> None:
    """Groups of the largest lengths, each with its own prompt, and a smaller one for the rest."""
    vocab = updater.model.arch.vocab
    samples = []
    for i, (prompt, completions) in enumerate(longest_groups(config, tokens)):
        ids = (i % vocab, i // vocab % vocab, *(0,) * prompt)[:prompt]
        samples += [TrainSample(ids, (0,) * n, (0.0,) * n, 1.0, True) for n in completions]
    updater.trial(samples, Tally())


def _what_fits(config: Config, updater: Updater, tokens: int, longest: int) -> str:
    while tokens > longest:
        tokens = max(longest, tokens // 2)
        torch.cuda.empty_cache()
        try:
            _try(config, updater, tokens)
        except torch.OutOfMemoryError:
            updater.optimizer.zero_grad(set_to_none=True)
            continue
        return (
            f"A micro-batch of micro_batch_tokens={config.micro_batch_tokens} does not fit this GPU. Lower "
            f"micro_batch_tokens to {tokens}, which fits."
        )
    return (
        f"Not even one sequence of {longest} tokens fits this GPU. Lower max_completion_length (now "
        f"{config.max_completion_length}) to {config.max_completion_length // 2}, or take a base of fewer bits."
    )
