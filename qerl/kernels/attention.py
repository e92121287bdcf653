"""Causal attention over packed sequences: every token attends to itself and to earlier tokens of its own segment.

A CPU takes SDPA segment by segment; a GPU torch's varlen flash attention, for bf16 and fp16 (float32 takes SDPA).
"""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def packed_attention(
    q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, bounds_S1: Tensor, lengths: tuple[int, ...], window: int | None = None
) -> Tensor:
    """q [T, H, d], k and v [T, G, d] with H a multiple of G -> [T, H, d].

    bounds_S1: int32 [S + 1] on the device, where segments begin and end; lengths: their lengths as plain ints.
    window: a token sees only this many tokens, itself included; None for all.
    """
    if q_THd.is_cuda and q_THd.dtype in (torch.bfloat16, torch.float16):
        return _varlen(q_THd, k_TGd, v_TGd, bounds_S1, max(lengths), window)
    return packed_attention_reference(q_THd, k_TGd, v_TGd, lengths, window)


def packed_attention_reference(
    q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, lengths: tuple[int, ...], window: int | None = None
) -> Tensor:
    parts = []
    start = 0
    for length in lengths:
        q, k, v = (x[start : start + length].transpose(0, 1)[None] for x in (q_THd, k_TGd, v_TGd))
        mask = _window_mask(length, window, q_THd.device) if window is not None and length > window else None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
        start += length
    return torch.cat(parts)


def paged_attention(
    q_SHd: Tensor,
    keys_PGd: Tensor,
    values_PGd: Tensor,
    table_SB: Tensor,
    position_S: Tensor,
    block_size: int,
    window: int | None = None,
    scratch: list[Tensor] | None = None,
) -> Tensor:
    """One query a sequence over a paged cache: q [S, H, d] -> [S, H, d].

    keys_PGd, values_PGd: the cache, place = block * block_size + offset; table_SB int64: each sequence's blocks in
    order; position_S int64: a query sees the places of positions up to its own. scratch: two tensors, kept and grown,
    for the gathered keys and values. The reference, on any device.
    """
    sequences, blocks = table_SB.shape
    distance_SL = position_S[:, None] - torch.arange(blocks * block_size, device=q_SHd.device)
    seen_SL = distance_SL >= 0
    if window is not None:
        seen_SL = seen_SL & (distance_SL < window)

    def gather(cache_PGd: Tensor, which: int) -> Tensor:
        """The sequences' blocks side by side: [S, G, L, d]."""
        rows = cache_PGd.view(-1, block_size * cache_PGd[0].numel())
        index = table_SB.flatten()
        if scratch is None or q_SHd.is_cuda:
            found = rows.index_select(0, index)
        else:  # a CPU spends more on fresh pages than on the copy
            if len(scratch[which]) < len(index):
                scratch[which] = rows.new_empty(len(index), rows.shape[1])
            found = torch.index_select(rows, 0, index, out=scratch[which][: len(index)])
        return found.view(sequences, -1, *cache_PGd.shape[1:]).transpose(1, 2)

    k, v = gather(keys_PGd, 0), gather(values_PGd, 1)
    mask = seen_SL[:, None, None]
    return F.scaled_dot_product_attention(q_SHd[:, :, None], k, v, attn_mask=mask, enable_gqa=True)[:, :, 0]


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    at = torch.arange(length, device=device)
    distance = at[:, None] - at[None, :]
    return (distance >= 0) & (distance < window)


def _varlen(q: Tensor, k: Tensor, v: Tensor, bounds_S1: Tensor, longest: int, window: int | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # Older releases take grouped heads without being told.
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    left = -1 if window is None else window - 1
    out = varlen_attn(q, k, v, bounds_S1, bounds_S1, longest, longest, window_size=(left, 0), **grouped)
    assert isinstance(out, Tensor)
    return out
