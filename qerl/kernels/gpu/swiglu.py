"""silu(gate) * up, rounded where PyTorch rounds, so that sampler and trainer agree."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.gpu.launch import early, wait

BLOCK = 1024


@triton.jit
def _swiglu(gate_up, out, width, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=mask, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + at, (silu * up).to(out.dtype.element_ty), mask=mask)


def swiglu(gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    grid = (out.numel() // width, triton.cdiv(width, BLOCK))
    _swiglu[grid](gate_up, out, width, BLOCK=BLOCK, num_warps=4, **early(out))
    return out
