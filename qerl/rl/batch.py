"""What one update trains on: completions with advantages, packed into micro-batches under a token budget."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl.kernels.expand import Copies
from qerl.model.packing import Continued, Packed, pack_shared


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
    """Whole sequences, packed, those of one prompt next to each other. N counts their completion tokens, in order."""

    samples: tuple[TrainSample, ...]
    packed: Packed
    places: Copies  # N of the T hidden states: where each completion token is predicted
    targets_N: Tensor  # int64: which it is
    sequence_N: Tensor  # int64: which sequence it is of
    advantage_N: Tensor
    coefficient_N: Tensor
    behaviour_N: Tensor


Taken = list[tuple[TrainSample, float]]  # with the coefficient of each


def micro_batches(
    samples: Sequence[TrainSample], coefficients: Sequence[float], budget: int, device: torch.device
) -> Iterator[MicroBatch]:
    """Within the budget of tokens that are computed, where a prompt counts once for all its completions in a micro-
    batch. Sequences that count nothing are left out.

    A prompt's completions stay together where they fit the budget, and are cut into as few pieces as can be, in order,
    where they do not; each piece goes into the first micro-batch with room. A sequence that is longer goes alone.
    """
    pairs = zip(samples, coefficients, strict=True)
    found: list[tuple[int, Taken]] = []
    for tokens, piece in _pieces([(sample, coefficient) for sample, coefficient in pairs if coefficient], budget):
        at = next((i for i, (held, _) in enumerate(found) if held + tokens <= budget), len(found))
        if at == len(found):
            found.append((0, []))
        held, taken = found[at]
        found[at] = (held + tokens, taken + piece)
    for _, taken in found:
        yield _assemble(taken, device)


def _by_prompt(taken: Taken) -> list[Taken]:
    groups: dict[tuple[int, ...], Taken] = {}
    for sample, coefficient in taken:
        groups.setdefault(sample.prompt_ids, []).append((sample, coefficient))
    return list(groups.values())


def _pieces(taken: Taken, budget: int) -> Iterator[tuple[int, Taken]]:
    """The samples of each prompt, with the tokens that they take together."""
    for group in _by_prompt(taken):
        prompt = len(group[0][0].prompt_ids)
        piece: Taken = []
        tokens = prompt
        for sample, coefficient in group:
            if piece and tokens + len(sample.token_ids) > budget:
                yield tokens, piece
                piece, tokens = [], prompt
            piece.append((sample, coefficient))
            tokens += len(sample.token_ids)
        yield tokens, piece


def _assemble(taken: Taken, device: torch.device) -> MicroBatch:
    groups = _by_prompt(taken)
    pairs = [pair for group in groups for pair in group]
    samples = tuple(sample for sample, _ in pairs)
    packed, places, targets_N = pack_shared(
        [Continued(group[0][0].prompt_ids, [sample.token_ids for sample, _ in group]) for group in groups], device
    )

    def spread(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """One value a sequence to one a token."""
        flat = [value for value, sample in zip(values, samples, strict=True) for _ in sample.token_ids]
        return torch.tensor(flat, dtype=dtype, device=device)

    return MicroBatch(
        samples,
        packed,
        places,
        targets_N,
        spread(range(len(samples)), torch.int64),
        spread([sample.advantage for sample in samples], torch.float32),
        spread([coefficient for _, coefficient in pairs], torch.float32),
        torch.tensor([p for sample in samples for p in sample.behaviour], dtype=torch.float32, device=device),
    )
