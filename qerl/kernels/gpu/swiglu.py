"""silu(gate) * up, rounded where PyTorch rounds. (Our own linears on Hopper form it themselves,
from float32 sums.)"""

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


@triton.jit
def _backward(gate_up, dh, width, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    to_gate, to_up, to_h = gate_up + row * 2 * width + at, gate_up + row * 2 * width + width + at, dh + row * width + at
    gate = tl.load(to_gate, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(to_up, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(to_h, mask=mask, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = (gate / (1.0 + tl.exp(-gate))).to(dh.dtype.element_ty).to(tl.float32)
    tl.store(to_h, (silu * up).to(dh.dtype.element_ty), mask=mask)
    tl.store(to_up, (grad * silu).to(dh.dtype.element_ty), mask=mask)
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(to_gate, (grad * up * slope).to(dh.dtype.element_ty), mask=mask)


def swiglu_backward(gate_up: Tensor, dh: Tensor) -> None:
    """As `swiglu_backward_reference`; both contiguous."""
    assert gate_up.is_contiguous(), "gate_up is overwritten"
    assert dh.is_contiguous(), "dh is overwritten"
    width = dh.shape[-1]
    grid = (dh.numel() // width, triton.cdiv(width, BLOCK))
    _backward[grid](gate_up, dh, width, BLOCK=BLOCK, num_warps=4, **early(dh))
