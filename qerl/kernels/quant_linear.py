"""y = x W^T for a frozen weight kept in 4 bits.

The weight is dequantized for the product and not kept: the backward pass, which needs only dx = dy W, dequantizes it
again: on a GPU by a kernel (`gpu/fp4_tiled`, `gpu/nf4_linear`).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _QuantLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dequantize: Callable[[torch.dtype], Tensor]) -> Tensor:
        ctx.dequantize = dequantize
        return F.linear(x, dequantize(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (dy,) = grads
        return dy @ ctx.dequantize(dy.dtype), None


def quant_linear(x: Tensor, dequantize: Callable[[torch.dtype], Tensor]) -> Tensor:
    """x [..., K] -> [..., N]; dequantize(dtype) gives the weight [N, K]."""
    out: Tensor = _QuantLinear.apply(x, dequantize)  # type: ignore[no-untyped-call]
    return out
