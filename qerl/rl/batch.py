"""What one update trains on: completions with advantages, packed into micro-batches under a token budget."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl.model.packing import Packed, pack


@dataclass
class TrainSample:
    """A completion on its way through the updates of its rollout."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # of the completion, as drawn
    behaviour: tuple[float, ...]  # the sampler's log-prob of each
    advantage: float
    in_loss: bool  # False: truncated, and such are masked
    old_logp: Tensor | None = None  # the clean policy's at rollout time, where there is more than one update
    ref_logp: Tensor | None = None  # the policy's without adapter, with beta

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)


@dataclass(frozen=True)
class MicroBatch:
    """Whole sequences, packed. N counts their completion tokens, in order."""

    samples: tuple[TrainSample, ...]
    packed: Packed
    places_N: Tensor  # int64: where each completion token is predicted
    targets_N: Tensor  # int64: which it is
    sequence_N: Tensor  # int64: which sequence it is of
    advantage_N: Tensor
    coefficient_N: Tensor
    behaviour_N: Tensor


def micro_batches(
    samples: Sequence[TrainSample], coefficients: Sequence[float], budget: int, device: torch.device
) -> Iterator[MicroBatch]:
    """In order, as many sequences at a time as fit the budget of tokens; a longer one goes alone. Sequences that count
    nothing are left out."""
    taken: list[tuple[TrainSample, float]] = []
    tokens = 0
    for sample, coefficient in zip(samples, coefficients, strict=True):
        if coefficient == 0.0:
            continue
        if taken and tokens + sample.length > budget:
            yield _assemble(taken, device)
            taken, tokens = [], 0
        taken.append((sample, coefficient))
        tokens += sample.length
    if taken:
        yield _assemble(taken, device)


def _assemble(taken: list[tuple[TrainSample, float]], device: torch.device) -> MicroBatch:
    samples = tuple(sample for sample, _ in taken)
    packed = pack([[*sample.prompt_ids, *sample.token_ids] for sample in samples], device)
    places: list[int] = []
    start = 0
    for sample in samples:
        first = start + len(sample.prompt_ids) - 1  # the prompt's last token predicts the completion's first
        places += range(first, first + len(sample.token_ids))
        start += sample.length

    def spread(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """One value a sequence to one a token."""
        flat = [value for value, sample in zip(values, samples, strict=True) for _ in sample.token_ids]
        return torch.tensor(flat, dtype=dtype, device=device)

    places_N = torch.tensor(places, dtype=torch.int64, device=device)
    return MicroBatch(
        samples,
        packed,
        places_N,
        packed.ids_T[places_N + 1],
        spread(range(len(samples)), torch.int64),
        spread([sample.advantage for sample in samples], torch.float32),
        spread([coefficient for _, coefficient in taken], torch.float32),
        torch.tensor([p for sample in samples for p in sample.behaviour], dtype=torch.float32, device=device),
    )
