"""SwiGLU: silu(gate) * up, on the fused output of the gate and up projections."""

import torch.nn.functional as F
from torch import Tensor

from qerl.kernels.choice import fused


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2I], gate first, any float dtype -> [..., I] in the same."""
    if fused(gate_up):
        from qerl.kernels.gpu import swiglu as gpu

        return gpu.swiglu(gate_up)
    return swiglu_reference(gate_up)


def swiglu_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
