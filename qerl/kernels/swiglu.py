"""SwiGLU: silu(gate) * up, on the fused output of the gate and up projections."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import increment_version


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2I], gate first, any float dtype -> [..., I] in the same. The backward pass keeps gate_up and writes its
    gradient there, so nothing else may keep it."""
    if torch.is_grad_enabled() and gate_up.requires_grad:
        out: Tensor = _Swiglu.apply(gate_up)  # type: ignore[no-untyped-call]
        return out
    return swiglu_forward(gate_up)


def swiglu_forward(gate_up: Tensor) -> Tensor:
    """Without autograd."""
    if gate_up.is_cuda:
        from qerl.kernels.gpu import swiglu as gpu

        return gpu.swiglu(gate_up)
    return swiglu_reference(gate_up)


def swiglu_backward(gate_up: Tensor, dh: Tensor) -> None:
    """In place, where memory is dear: dh becomes silu(gate) * up, which LoRA's gradient needs once more, and gate_up
    its own gradient. A second backward pass over it is refused by autograd."""
    if gate_up.is_cuda:
        from qerl.kernels.gpu import swiglu as gpu

        gpu.swiglu_backward(gate_up, dh)
    else:
        swiglu_backward_reference(gate_up, dh)
    increment_version(gate_up)


def swiglu_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_backward_reference(gate_up: Tensor, dh: Tensor) -> None:
    halves = gate_up.chunk(2, dim=-1)
    gate, up = (half.to(torch.float32) for half in halves)
    silu = F.silu(gate).to(dh.dtype)
    h, dgate = silu * up, torch.ops.aten.silu_backward(dh * up, gate)
    halves[1].copy_(dh * silu)
    halves[0].copy_(dgate)
    dh.copy_(h)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return swiglu_forward(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        gate_up: Tensor = ctx.saved_tensors[0]
        swiglu_backward(gate_up, grads[0].clone(memory_format=torch.contiguous_format))
        return gate_up.detach()
