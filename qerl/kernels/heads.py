"""From the fused q, k, v of a layer to heads: the norm of each head (Qwen3), then rope; for a cache, written there.

q' = rope(norm(q))        k' = rope(norm(k))        v' = v
"""

from dataclasses import dataclass

from torch import Tensor

from qerl.kernels.choice import fused
from qerl.kernels.fp8_cache import to_fp8
from qerl.kernels.rms_norm import rms_norm_reference
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
    """q [T, H, d], k and v [T, G, d]; in PyTorch on any device, for autograd."""
    h, g = heads.counts
    parts = heads.qkv_TN.view(len(heads.qkv_TN), h + 2 * g, -1)
    q, k, v = parts[:, :h], parts[:, h : h + g], parts[:, h + g :]
    if heads.gains is not None:
        q, k = (rms_norm_reference(x, gain, heads.eps) for x, gain in zip((q, k), heads.gains, strict=True))
    return rope(q, heads.cos, heads.sin), rope(k, heads.cos, heads.sin), v


def turned_into_cache(
    heads: Heads, keys_PGd: Tensor, values_PGd: Tensor, places_T: Tensor, scales_2PG: Tensor | None = None
) -> Tensor:
    """q [T, H, d]; k and v are written to keys_PGd and values_PGd [P, G, d], contiguous, at places_T int64 [T].

    scales_2PG: float32, contiguous: the cache is FP8 (`fp8_cache`), and the scales of keys and values go there.
    """
    if fused(heads.qkv_TN, *(heads.gains or ())):
        from qerl.kernels.gpu import heads as gpu

        return gpu.turned_into_cache(heads, keys_PGd, values_PGd, places_T, scales_2PG)
    q, k, v = turned(heads)
    if scales_2PG is not None:
        (k, scales_2PG[0, places_T]), (v, scales_2PG[1, places_T]) = to_fp8(k), to_fp8(v)
    keys_PGd[places_T], values_PGd[places_T] = k, v
    return q
