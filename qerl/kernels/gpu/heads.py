"""Norm and rope of the heads and the cache's two writes in one launch.

Rounded where PyTorch rounds (after the norm, after each product), so that sampler and trainer agree.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.fp8_cache import LARGEST, SMALLEST
from qerl.kernels.gpu.launch import early, wait

if TYPE_CHECKING:
    from qerl.kernels.heads import Heads


@triton.jit
def _rounded(x, like):
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _turn(
    qkv, cos, sin, q_gain, k_gain, out, keys, values, places, key_scales, value_scales, qkv_stride, eps,
    H: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, NORMS: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    inside = at < HALF
    mask = (head < H + 2 * G) & inside
    source = qkv + row * qkv_stride + head * (2 * HALF) + at
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    is_q, is_k, is_v = head < H, (head >= H) & (head < H + G), head >= H + G
    x, y = first, second
    if NORMS:
        scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / (2 * HALF) + eps)[:, None]
        q_first, q_second = tl.load(q_gain + at, inside, 0.0), tl.load(q_gain + HALF + at, inside, 0.0)
        k_first, k_second = tl.load(k_gain + at, inside, 0.0), tl.load(k_gain + HALF + at, inside, 0.0)
        x = _rounded(tl.where(is_q, q_first, k_first) * (x * scale), out)
        y = _rounded(tl.where(is_q, q_second, k_second) * (y * scale), out)
    c = tl.load(cos + row * 2 * HALF + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + row * 2 * HALF + at, mask=inside, other=0.0).to(tl.float32)
    low = tl.where(is_v, first, _rounded(x * c, out) - _rounded(y * s, out)).to(out.dtype.element_ty)
    high = tl.where(is_v, second, _rounded(y * c, out) + _rounded(x * s, out)).to(out.dtype.element_ty)
    to_q = out + (row * H + head) * (2 * HALF) + at
    tl.store(to_q, low, mask=mask & is_q)
    tl.store(to_q + HALF, high, mask=mask & is_q)
    place = tl.load(places + row)
    if LARGEST > 0:  # FP8
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        most = tl.maximum(tl.max(tl.abs(wide_low), 1), tl.max(tl.abs(wide_high), 1))[:, None]
        most = tl.maximum(most, SMALLEST)
        limit = tl.full((HEADS, 1), LARGEST, tl.float32)
        factor, scale = tl.div_rn(limit, most), tl.div_rn(most, limit)
        low, high = (wide_low * factor).to(keys.dtype.element_ty), (wide_high * factor).to(keys.dtype.element_ty)
        tl.store(key_scales + place * G + head - H, scale, mask=is_k)
        tl.store(value_scales + place * G + head - H - G, scale, mask=is_v & (head < H + 2 * G))
    to_k = keys + (place * G + head - H) * (2 * HALF) + at
    tl.store(to_k, low, mask=mask & is_k)
    tl.store(to_k + HALF, high, mask=mask & is_k)
    to_v = values + (place * G + head - H - G) * (2 * HALF) + at
    tl.store(to_v, low, mask=mask & is_v)
    tl.store(to_v + HALF, high, mask=mask & is_v)


def turned_into_cache(
    heads: "Heads", keys_PGd: Tensor, values_PGd: Tensor, places_T: Tensor, scales_2PG: Tensor | None = None
) -> Tensor:
    qkv, (h, g), (tokens, _, d) = heads.qkv_TN, heads.counts, heads.cos.shape
    assert qkv.stride(1) == 1, "a row of qkv must be contiguous"
    assert heads.cos.is_contiguous(), "tables must be contiguous"
    assert heads.sin.is_contiguous(), "tables must be contiguous"
    assert keys_PGd.is_contiguous(), "keys must be contiguous"
    assert values_PGd.is_contiguous(), "values must be contiguous"
    assert places_T.is_contiguous(), "places must be contiguous"
    out = torch.empty(tokens, h, d, dtype=qkv.dtype, device=qkv.device)
    q_gain, k_gain = heads.gains or (None, None)
    key_scales, value_scales = (None, None) if scales_2PG is None else scales_2PG
    each = 4 if tokens <= 64 else 16  # heads to a program: few where there are few programs
    _turn[(tokens, triton.cdiv(h + 2 * g, each))](
        qkv, heads.cos, heads.sin, q_gain, k_gain, out, keys_PGd, values_PGd, places_T,
        key_scales, value_scales, qkv.stride(0), heads.eps,
        H=h, G=g, HALF=d // 2, HEADS=each, BLOCK=triton.next_power_of_2(d // 2),
        NORMS=heads.gains is not None, LARGEST=0.0 if scales_2PG is None else LARGEST, SMALLEST=SMALLEST,
        num_warps=2 if each == 4 else 4, **early(qkv),
    )  # fmt: skip
    return out


@triton.jit
def _one_of(q, k, v, row, head, at, mask, H: tl.constexpr, G: tl.constexpr, d: tl.constexpr):
    """Elements `at` of each head, float32: the first H from q [T, H, d], the next G from k, the last from v."""
    from_q = tl.load(q + (row * H + head) * d + at, mask=mask & (head < H), other=0.0)
    from_k = tl.load(k + (row * G + head - H) * d + at, mask=mask & (head >= H) & (head < H + G), other=0.0)
    from_v = tl.load(v + (row * G + head - H - G) * d + at, mask=mask & (head >= H + G), other=0.0)
    return from_q.to(tl.float32) + from_k.to(tl.float32) + from_v.to(tl.float32)


@triton.jit
def _turn_heads(
    qkv, dq, dk, dv, out, qkv_stride, cos, sin, q_gain, k_gain, eps,
    H: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    NORMS: tl.constexpr, BACK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [T, (H + 2G) d]: the heads of qkv turned; BACK: their gradients turned back, and through the norms."""
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    inside = at < HALF
    mask = (head < H + 2 * G) & inside
    is_q, is_v = head < H, head >= H + G
    source = qkv + row * qkv_stride + head * (2 * HALF) + at
    if BACK:
        first = _one_of(dq, dk, dv, row, head, at, mask, H, G, 2 * HALF)
        second = _one_of(dq, dk, dv, row, head, at + HALF, mask, H, G, 2 * HALF)
    else:
        first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + row * 2 * HALF + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + row * 2 * HALF + at, mask=inside, other=0.0).to(tl.float32)
    x, y = first, second
    if NORMS:
        q_first, q_second = tl.load(q_gain + at, inside, 0.0), tl.load(q_gain + HALF + at, inside, 0.0)
        k_first, k_second = tl.load(k_gain + at, inside, 0.0), tl.load(k_gain + HALF + at, inside, 0.0)
        low_gain, high_gain = tl.where(is_q, q_first, k_first), tl.where(is_q, q_second, k_second)
    if BACK:
        low, high = _rounded(x * c, out) + _rounded(y * s, out), _rounded(y * c, out) - _rounded(x * s, out)
        if NORMS:
            u = tl.load(source, mask=mask, other=0.0).to(tl.float32)
            w = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
            scale = tl.rsqrt((tl.sum(u * u, 1) + tl.sum(w * w, 1)) / (2 * HALF) + eps)[:, None]
            u, w = u * scale, w * scale
            low, high = low_gain * _rounded(low, out), high_gain * _rounded(high, out)
            along = ((tl.sum(low * u, 1) + tl.sum(high * w, 1)) / (2 * HALF))[:, None]
            low, high = scale * (low - u * along), scale * (high - w * along)
    else:
        if NORMS:
            scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / (2 * HALF) + eps)[:, None]
            x, y = _rounded(low_gain * (x * scale), out), _rounded(high_gain * (y * scale), out)
        low, high = _rounded(x * c, out) - _rounded(y * s, out), _rounded(y * c, out) + _rounded(x * s, out)
    low = tl.where(is_v, first, low).to(out.dtype.element_ty)
    high = tl.where(is_v, second, high).to(out.dtype.element_ty)
    target = out + (row * (H + 2 * G) + head) * (2 * HALF) + at
    tl.store(target, low, mask=mask)
    tl.store(target + HALF, high, mask=mask)


def turned(heads: "Heads") -> Tensor:
    """q, k and v turned, side by side: [T, (H + 2G) d]."""
    return _launch(heads, (heads.qkv_TN,) * 3, back=False)


def turned_back(heads: "Heads", dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
    """As `turned_back_reference`."""
    return _launch(heads, (dq.contiguous(), dk.contiguous(), dv.contiguous()), back=True)


def _launch(heads: "Heads", grads: tuple[Tensor, ...], back: bool) -> Tensor:
    qkv, (h, g), (tokens, _, d) = heads.qkv_TN, heads.counts, heads.cos.shape
    assert qkv.stride(-1) == 1, "a row of qkv must be contiguous"
    assert heads.cos.is_contiguous(), "tables must be contiguous"
    assert heads.sin.is_contiguous(), "tables must be contiguous"
    out = torch.empty(tokens, (h + 2 * g) * d, dtype=qkv.dtype, device=qkv.device)
    q_gain, k_gain = heads.gains or (None, None)
    each = 16  # heads to a program
    _turn_heads[(tokens, triton.cdiv(h + 2 * g, each))](
        qkv, *grads, out, qkv.stride(0), heads.cos, heads.sin, q_gain, k_gain, heads.eps,
        H=h, G=g, HALF=d // 2, HEADS=each, BLOCK=triton.next_power_of_2(d // 2),
        NORMS=heads.gains is not None, BACK=back, num_warps=4, **early(out),
    )  # fmt: skip
    return out
