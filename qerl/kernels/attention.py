"""Causal attention over packed sequences: every token attends to itself and to earlier tokens of its own segment.

The queries of a segment may be its last tokens only (the keys of the others lie in a cache, or are a prompt's that
several share): the last query sees all keys. A CPU takes SDPA segment by segment; a GPU torch's varlen flash attention,
for bf16 and fp16 (float32 takes SDPA), which aligns queries and keys of unequal number at their ends as well.
"""

import inspect
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Lengths = tuple[int, ...]


def packed_attention(
    q_THd: Tensor,
    k_KGd: Tensor,
    v_KGd: Tensor,
    bounds_S1: Tensor | tuple[Tensor, Tensor],
    lengths: Lengths | tuple[Lengths, Lengths],
    window: int | None = None,
) -> Tensor:
    """q [T, H, d], k and v [K, G, d] with H a multiple of G -> [T, H, d].

    bounds_S1: int32 [S + 1] on the device, where segments begin and end; lengths: their lengths as plain ints. Pairs of
    them, of queries and of keys, where a segment has more keys than queries. window: a token sees only this many
    tokens, itself included; None for all.
    """
    if q_THd.is_cuda and q_THd.dtype in (torch.bfloat16, torch.float16):
        bounds = (bounds_S1, bounds_S1) if isinstance(bounds_S1, Tensor) else bounds_S1
        return _varlen(q_THd, k_KGd, v_KGd, bounds, _pair(lengths), window)
    return packed_attention_reference(q_THd, k_KGd, v_KGd, lengths, window)


def packed_attention_reference(
    q_THd: Tensor,
    k_KGd: Tensor,
    v_KGd: Tensor,
    lengths: Lengths | tuple[Lengths, Lengths],
    window: int | None = None,
) -> Tensor:
    parts = []
    start = first = 0
    for queries, keys in zip(*_pair(lengths), strict=True):
        q = q_THd[start : start + queries].transpose(0, 1)[None]
        k, v = (x[first : first + keys].transpose(0, 1)[None] for x in (k_KGd, v_KGd))
        plain = queries == keys and (window is None or keys <= window)
        mask = None if plain else _mask(queries, keys, window, q_THd.device)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
        start, first = start + queries, first + keys
    return torch.cat(parts)


def _pair(lengths: Lengths | tuple[Lengths, Lengths]) -> tuple[Lengths, Lengths]:
    """Of queries and of keys."""
    if isinstance(lengths[0], int):
        return lengths, lengths
    return lengths


def _mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    at = torch.arange(keys, device=device)
    distance = at[keys - queries :, None] - at[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: tuple[Tensor, Tensor],
    lengths: tuple[Lengths, Lengths],
    window: int | None,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    left = -1 if window is None else window - 1
    out = varlen_attn(q, k, v, *bounds, max(lengths[0]), max(lengths[1]), window_size=(left, 0), **_grouped())
    assert isinstance(out, Tensor)
    return out


@cache  # a look at a signature takes longer than the launch, and every layer's call would take one
def _grouped() -> dict[str, Any]:
    """What tells varlen_attn of grouped heads; older releases take them without being told."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
