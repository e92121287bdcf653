"""Packed sequences: one after another in a single row of tokens, no padding anywhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """Sequences laid end to end; segment i is tokens bounds[i] to bounds[i+1]."""

    ids_T: Tensor  # int64
    positions_T: Tensor  # int64: each segment counts from 0
    bounds_S1: Tensor  # int32, on the same device
    lengths: tuple[int, ...]  # of the segments, as plain ints


def pack(sequences: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Packed:
    """Token sequences -> one packed row."""
    try:
        lengths = tuple(len(sequence) for sequence in sequences)
        ids_T = torch.tensor([token for sequence in sequences for token in sequence])
    except (TypeError, ValueError) as error:
        raise ValueError("pack takes a list of sequences, each a list of token ids.") from error
    if not lengths or min(lengths) == 0:
        raise ValueError("Packing needs at least one sequence, and none may be empty.")
    if ids_T.dtype != torch.int64 or ids_T.dim() != 1:
        raise ValueError("pack takes a list of sequences, each a list of token ids.")
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    bounds_S1 = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return Packed(ids_T.to(device), positions_T.to(device), bounds_S1.to(device), lengths)


def next_tokens(packed: Packed) -> tuple[Tensor, Tensor]:
    """Where each next token is predicted, and which it is: (places_N, targets_N). A segment's last token predicts
    nothing, so no target crosses into the next segment."""
    last = packed.bounds_S1[1:].to(torch.int64) - 1
    predicts = torch.ones_like(packed.ids_T, dtype=torch.bool)
    predicts[last] = False
    places_N = predicts.nonzero()[:, 0]
    return places_N, packed.ids_T[places_N + 1]
