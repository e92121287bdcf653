"""SwiGLU: silu(gate) * up, on the fused output of the gate and up projections."""

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2I], gate first -> [..., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
