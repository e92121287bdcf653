"""From the fused q, k, v of a layer to heads: the norm of each head (Qwen3), then rope; for a cache, written there.

q' = rope(norm(q))        k' = rope(norm(k))        v' = v

For training q', k' and v' lie in one tensor of their own, so that what the projection gave need not be kept, except
where norms are.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qerl.kernels.choice import fused
from qerl.kernels.fp8_cache import to_fp8
from qerl.kernels.rms_norm import rms_norm_backward_reference, rms_norm_reference
from qerl.kernels.rope import rope


@dataclass(frozen=True)
class Heads:
    """One layer's q, k and v for T tokens as the projection gives them."""

    qkv_TN: Tensor  # [T, (H + 2G) d]: H query heads, then G key heads, then G value heads; rows contiguous
    counts: tuple[int, int]  # H, G
    cos: Tensor  # [T, 1, d], as `rope_tables` gives them, of qkv's dtype
    sin: Tensor
    gains: tuple[Tensor, Tensor] | None = None  # of the norms of q and of k, float32 [d] each
    eps: float = 0.0  # of those norms


def turned(heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, H, d], k and v [T, G, d], with gradients."""
    if heads.gains is not None and any(gain.requires_grad for gain in heads.gains):
        return turned_reference(heads)
    q, k, v = _Turn.apply(heads.qkv_TN, heads)  # type: ignore[no-untyped-call]
    return q, k, v


def turned_reference(heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _split(heads.qkv_TN, heads)
    if heads.gains is not None:
        q, k = (rms_norm_reference(x, gain, heads.eps) for x, gain in zip((q, k), heads.gains, strict=True))
    return rope(q, heads.cos, heads.sin), rope(k, heads.cos, heads.sin), v


def turned_back_reference(heads: Heads, dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
    """The gradients of what `turned` gives -> that of qkv."""
    dq, dk = (rope(x, heads.cos, -heads.sin) for x in (dq, dk))
    if heads.gains is not None:
        parts = zip(_split(heads.qkv_TN, heads), heads.gains, (dq, dk), strict=False)
        dq, dk = (rms_norm_backward_reference(x, gain, heads.eps, None, None, dx, False)[0] for x, gain, dx in parts)
    return torch.cat([dq, dk, dv], dim=1).flatten(1)


class _Turn(torch.autograd.Function):
    """heads: of the same qkv_TN; its tables and gains are not differentiated."""

    @staticmethod
    def forward(ctx: Any, qkv_TN: Tensor, heads: Heads) -> tuple[Tensor, ...]:
        ctx.save_for_backward(heads.cos, heads.sin, *((qkv_TN, *heads.gains) if heads.gains is not None else ()))
        ctx.counts, ctx.eps = heads.counts, heads.eps
        if qkv_TN.is_cuda:
            from qerl.kernels.gpu import heads as gpu

            return _split(gpu.turned(heads), heads)
        return _split(torch.cat(turned_reference(heads), dim=1).flatten(1), heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        cos, sin, *normed = ctx.saved_tensors
        qkv_TN, gains = (normed[0], (normed[1], normed[2])) if normed else (grads[0], None)
        heads = Heads(qkv_TN, ctx.counts, cos, sin, gains, ctx.eps)
        if cos.is_cuda:
            from qerl.kernels.gpu import heads as gpu

            return gpu.turned_back(heads, *grads), None
        return turned_back_reference(heads, *grads), None


def _split(qkv_TN: Tensor, heads: Heads) -> tuple[Tensor, ...]:
    """Views: q [T, H, d], k and v [T, G, d]."""
    h, g = heads.counts
    parts = qkv_TN.view(len(qkv_TN), h + 2 * g, -1)
    return parts[:, :h], parts[:, h : h + g], parts[:, h + g :]


def turned_into_cache(
    heads: Heads, keys_PGd: Tensor, values_PGd: Tensor, places_T: Tensor, scales_2PG: Tensor | None = None
) -> Tensor:
    """q [T, H, d]; k and v are written to keys_PGd and values_PGd [P, G, d], contiguous, at places_T int64 [T].

    scales_2PG: float32, contiguous: the cache is FP8 (`fp8_cache`), and the scales of keys and values go there.
    """
    if fused(heads.qkv_TN, *(heads.gains or ())):
        from qerl.kernels.gpu import heads as gpu

        return gpu.turned_into_cache(heads, keys_PGd, values_PGd, places_T, scales_2PG)
    return turned_into_cache_reference(heads, keys_PGd, values_PGd, places_T, scales_2PG)


def turned_into_cache_reference(
    heads: Heads, keys_PGd: Tensor, values_PGd: Tensor, places_T: Tensor, scales_2PG: Tensor | None = None
) -> Tensor:
    q, k, v = turned_reference(heads)
    if scales_2PG is not None:
        (k, scales_2PG[0, places_T]), (v, scales_2PG[1, places_T]) = to_fp8(k), to_fp8(v)
    keys_PGd[places_T], values_PGd[places_T] = k, v
    return q
