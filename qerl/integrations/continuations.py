"""Log-probabilities of continuations of contexts, and whether greedy decoding would give them, on packed forwards."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl.kernels.logprob import CHUNK_BYTES
from qerl.model.decoder import Decoder
from qerl.model.packing import pack

TOKENS = 8192  # that go through the model at a time, unless one sequence has more


@dataclass(frozen=True)
class Continuation:
    """inputs goes through the model; its last len(targets) places predict the targets."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]

    @classmethod
    def of(cls, context: Sequence[int], continuation: Sequence[int], max_length: int) -> "Continuation":
        """A context that is too long loses its beginning."""
        if not context or not 0 < len(continuation) <= max_length:
            raise ValueError(
                f"A continuation has 1 to {max_length} tokens (the context's length), after at least one of context; "
                f"this one has {len(continuation)} after {len(context)}."
            )
        inputs = (*context, *continuation)[-max_length - 1 : -1]
        return cls(tuple(inputs), tuple(continuation))


def score_continuations(
    model: Decoder, asked: Sequence[Continuation], on_done: Callable[[int], object] = lambda count: None
) -> list[tuple[float, bool]]:
    """(sum of log p, all of them greedy) of each. Inputs that are the same, as those of one-token choices are, go
    through the model once."""
    sharing: dict[tuple[int, ...], list[int]] = {}
    for i, one in enumerate(asked):
        sharing.setdefault(one.inputs, []).append(i)
    found: dict[int, tuple[float, bool]] = {}
    with torch.no_grad():
        for inputs in _batches(sorted(sharing, key=len, reverse=True)):
            hidden_TD = model(pack(inputs, model.device))
            end = 0
            for sequence in inputs:
                end += len(sequence)
                for i in sharing[sequence]:
                    targets = torch.tensor(asked[i].targets, device=model.device)
                    found[i] = _score(model, hidden_TD[end - len(targets) : end], targets)
                on_done(len(sharing[sequence]))
    return [found[i] for i in range(len(asked))]


def _score(model: Decoder, hidden_ND: Tensor, targets_N: Tensor) -> tuple[float, bool]:
    chunk = max(1, CHUNK_BYTES // (4 * model.arch.vocab))
    total, greedy = 0.0, True
    for start in range(0, len(targets_N), chunk):
        logits_CV, targets_C = model.logits(hidden_ND[start : start + chunk]), targets_N[start : start + chunk]
        logprobs_C = torch.log_softmax(logits_CV, dim=-1).gather(1, targets_C[:, None])
        total += float(logprobs_C.sum())
        greedy = greedy and bool((logits_CV.argmax(-1) == targets_C).all())
    return total, greedy


def _batches(sequences: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    batch: list[tuple[int, ...]] = []
    for sequence in sequences:
        if batch and sum(map(len, batch)) + len(sequence) > TOKENS:
            yield batch
            batch = []
        batch.append(sequence)
    if batch:
        yield batch
