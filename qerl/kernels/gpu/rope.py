"""The tables of a step's positions, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.gpu.launch import early, wait


@triton.jit(do_not_specialize=["stride"])
def _tables(
    positions, frequencies, cos, sin, stride, factor, HALF: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < HALF
    frequency = tl.load(frequencies + at, mask=mask, other=0.0)
    wait(EARLY)
    angle = tl.load(positions + row * stride).to(tl.float32) * frequency
    c = (tl.cos(angle) * factor).to(cos.dtype.element_ty)
    s = (tl.sin(angle) * factor).to(sin.dtype.element_ty)
    to = row * 2 * HALF + at
    tl.store(cos + to, c, mask=mask)
    tl.store(cos + to + HALF, c, mask=mask)
    tl.store(sin + to, s, mask=mask)
    tl.store(sin + to + HALF, s, mask=mask)


def rope_tables(positions_T: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    tokens, half = len(positions_T), len(frequencies)
    cos, sin = torch.empty(2, tokens, 1, 2 * half, dtype=dtype, device=positions_T.device)
    _tables[(tokens,)](
        positions_T, frequencies, cos, sin, positions_T.stride(0), factor,
        HALF=half, BLOCK=triton.next_power_of_2(half), num_warps=1, **early(cos),
    )  # fmt: skip
    return cos, sin
