"""Packed sequences: one after another in a single row of tokens, no padding anywhere.

Sequences that begin with the same prompt can share it: the first of them lies there whole, of the others only what
follows. Their queries are these tokens alone, at the positions after the prompt; their keys and values are copies of
the prompt's, then their own. A hidden state depends on earlier tokens only, so nothing changes but the work.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from qerl.kernels.attention import packed_attention
from qerl.kernels.expand import Copies, copies, expand


@dataclass(frozen=True)
class Keys:
    """The keys of each segment where they are more than its own tokens."""

    copied: Copies  # K of the T tokens
    bounds_S1: Tensor  # int32, on the same device
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Packed:
    """Sequences laid end to end; segment i is tokens bounds[i] to bounds[i+1]."""

    ids_T: Tensor  # int64
    positions_T: Tensor  # int64: each sequence counts from 0
    bounds_S1: Tensor  # int32, on the same device
    lengths: tuple[int, ...]  # of the segments, as plain ints
    keys: Keys | None = None  # None: a segment attends to itself alone

    def attend(self, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, window: int | None = None) -> Tensor:
        """Causal attention within each sequence; see packed_attention."""
        if self.keys is None:
            return packed_attention(q_THd, k_TGd, v_TGd, self.bounds_S1, self.lengths, window)
        k_KGd, v_KGd = expand(k_TGd, self.keys.copied), expand(v_TGd, self.keys.copied)
        bounds, lengths = (self.bounds_S1, self.keys.bounds_S1), (self.lengths, self.keys.lengths)
        return packed_attention(q_THd, k_KGd, v_KGd, bounds, lengths, window)


@dataclass(frozen=True)
class Continued:
    """A prompt and what follows it, several times over."""

    prompt: Sequence[int]  # not empty
    completions: Sequence[Sequence[int]]


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
    return Packed(ids_T.to(device), positions_T.to(device), _bounds(lengths).to(device), lengths)


def pack_shared(groups: Sequence[Continued], device: torch.device | str = "cpu") -> tuple[Packed, Copies, Tensor]:
    """Prompts with their completions -> one packed row with each prompt once; where each completion token is predicted,
    as copies of the row's hidden states; and which token it is: (packed, places, targets_N).

    All first tokens of a group's completions are predicted at the prompt's last. A prompt with one completion is packed
    as `pack` does it, and so is a row of such prompts as a whole.
    """
    ids: list[int] = []
    targets: list[int] = []
    positions, places, sources = [], [], []
    lengths, key_lengths = [], []
    for group in groups:
        if not group.prompt or not group.completions:
            raise ValueError("A prompt must have a token, and a completion, which may be empty.")
        begin, length = len(ids), len(group.prompt)
        prompt = torch.arange(begin, begin + length)
        for i, completion in enumerate(group.completions):
            start = len(ids)
            ids += completion if i else [*group.prompt, *completion]
            end = len(ids)
            own = torch.arange(start, end)
            targets += completion
            if completion:
                places += [prompt[-1:], torch.arange(end - len(completion), end - 1)]
            if len(own):
                before = prompt if i else prompt[:0]
                sources += [before, own]
                positions.append(torch.arange(len(before), len(before) + len(own)))
                lengths.append(len(own))
                key_lengths.append(len(before) + len(own))
    keys = None
    if key_lengths != lengths:
        copied = copies(torch.cat(sources), len(ids), device)
        keys = Keys(copied, _bounds(key_lengths).to(device), tuple(key_lengths))
    packed = Packed(
        torch.tensor(ids, dtype=torch.int64, device=device),
        torch.cat(positions).to(device),
        _bounds(lengths).to(device),
        tuple(lengths),
        keys,
    )
    at_N = torch.cat(places) if places else torch.zeros(0, dtype=torch.int64)
    return packed, copies(at_N, len(ids), device), torch.tensor(targets, dtype=torch.int64, device=device)


def next_tokens(packed: Packed) -> tuple[Tensor, Tensor]:
    """Where each next token is predicted, and which it is: (places_N, targets_N). A segment's last token predicts
    nothing, so no target crosses into the next segment."""
    assert packed.keys is None, "where prompts are shared, pack_shared says where tokens are predicted"
    last = packed.bounds_S1[1:].to(torch.int64) - 1
    predicts = torch.ones_like(packed.ids_T, dtype=torch.bool)
    predicts[last] = False
    places_N = predicts.nonzero()[:, 0]
    return places_N, packed.ids_T[places_N + 1]


def _bounds(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
