"""The residual addition and the norm after it: one program a row, which it holds in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.gpu.launch import early, processors, wait


@triton.jit
def _add_rms_norm(
    x, delta, weight, noise, total, out, width, eps,
    ADDS: tl.constexpr, NOISY: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    mask = at < width
    gain = tl.load(weight + at, mask=mask, other=0.0)  # gains and noise never change within a step
    if NOISY:
        gain += tl.load(noise + at, mask=mask, other=0.0)
    wait(EARLY)
    value = tl.load(x + row + at, mask=mask, other=0.0)
    if ADDS:
        added = tl.load(delta + row + at, mask=mask, other=0.0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(total + row + at, value, mask=mask)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    tl.store(out + row + at, (gain * (wide * scale)).to(out.dtype.element_ty), mask=mask)


def add_rms_norm(
    x: Tensor, delta: Tensor | None, weight_D: Tensor, eps: float, noise_D: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x + delta (x itself where delta is None) and its norm."""
    x = x.contiguous()
    if delta is not None:
        delta = delta.contiguous()
    total = x if delta is None else torch.empty_like(x)
    out = torch.empty_like(x)
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    _add_rms_norm[(x.numel() // width,)](
        x, delta, weight_D, noise_D, total, out, width, eps,
        ADDS=delta is not None, NOISY=noise_D is not None, BLOCK=block,
        num_warps=min(max(block // 512, 1), 8), **early(x),
    )  # fmt: skip
    return total, out


@triton.jit(do_not_specialize=["rows"])
def _backward(
    total, weight, noise, dtotal, dy, dx, dgains, rows, width, eps,
    ADDS: tl.constexpr, NOISY: tl.constexpr, TRAINS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Each program takes every so-many-th row; the gain's gradient is summed in registers, and over programs later."""
    wait(EARLY)
    at = tl.arange(0, BLOCK)
    mask = at < width
    gain = tl.load(weight + at, mask=mask, other=0.0)
    if NOISY:
        gain += tl.load(noise + at, mask=mask, other=0.0)
    summed = tl.zeros((BLOCK,), dtype=tl.float32)
    here = tl.program_id(0).to(tl.int64) * width + at
    for _ in range(tl.program_id(0), rows, tl.num_programs(0)):
        value = tl.load(total + here, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(dy + here, mask=mask, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
        normed = value * scale
        if TRAINS:
            summed += grad * normed
        through = gain * grad
        result = scale * (through - normed * (tl.sum(through * normed, 0) / width))
        if ADDS:
            result += tl.load(dtotal + here, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + here, result.to(dx.dtype.element_ty), mask=mask)
        here += tl.num_programs(0) * width
    if TRAINS:
        tl.store(dgains + tl.program_id(0) * width + at, summed, mask=mask)


def rms_norm_backward(
    total: Tensor,
    weight_D: Tensor,
    eps: float,
    noise_D: Tensor | None,
    dtotal: Tensor | None,
    dy: Tensor,
    trains: bool,
) -> tuple[Tensor, Tensor | None]:
    """As `rms_norm_backward_reference`."""
    total, dy = total.contiguous(), dy.contiguous()
    dtotal = dtotal.contiguous() if dtotal is not None else None
    dx = torch.empty_like(total)
    width = total.shape[-1]
    rows = total.numel() // width
    programs = min(rows, 8 * processors(total))
    dgains = torch.empty(programs if trains else 0, width, dtype=torch.float32, device=total.device)
    block = triton.next_power_of_2(width)
    _backward[(programs,)](
        total, weight_D, noise_D, dtotal, dy, dx, dgains, rows, width, eps,
        ADDS=dtotal is not None, NOISY=noise_D is not None, TRAINS=trains, BLOCK=block,
        num_warps=min(max(block // 512, 1), 8), **early(total),
    )  # fmt: skip
    return dx, dgains.sum(0) if trains else None
