"""Which of an operation's two forms to run."""

import torch
from torch import Tensor


def fused(*tensors: Tensor | None) -> bool:
    """Whether the Triton kernel can serve: everything on a GPU, and no gradient asked for (autograd needs PyTorch)."""
    present = [tensor for tensor in tensors if tensor is not None]
    if not all(tensor.is_cuda for tensor in present):
        return False
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in present))
