"""y = x W^T + bias + LoRA for training: W is frozen, kept in 4 or 16 bits; gradients reach x and LoRA's A and B.

    u = scale x A^T        z = bias + u B^T        y = z + x W^T
    du = scale dy B        dx = dy W + du A        dA = du^T x        dB = dy^T u

LoRA comes first and the large product is added onto it, so that no sum is an operation of its own; the A of fused
projections are one product. A weight in 4 bits is dequantized for each product and not kept: the backward pass, which
needs only dx, dequantizes it again: on a GPU by a kernel (`gpu/fp4_tiled`, `gpu/nf4_linear`). Kept are x and u.

Two autograd functions share the work, so that a block that is recomputed stops before the last large product, which no
gradient needs: the first keeps all there is to keep, the second nothing. `gated` layers take gate and up, of which
silu(gate) * up is formed again in the backward pass rather than kept.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qerl.kernels.logprob import float32_product
from qerl.kernels.swiglu import swiglu, swiglu_backward, swiglu_forward

Dequantize = Callable[[torch.dtype], Tensor]  # the weight [N, K] in this dtype; valid until the next call


@dataclass(frozen=True)
class Part:
    """LoRA of one of the fused projections."""

    rows: slice  # of the stacked A, and of the columns of u
    columns: slice  # of y
    b: Tensor  # [N of the part, r], compute dtype


@dataclass(frozen=True)
class Adapter:
    """LoRA of the projections that are fused, in the compute dtype; those that have none are left out. Nothing may
    write to it between a forward and its backward."""

    a: Tensor  # [all rows, K]: the A one below the other; rows of no part are zero
    parts: tuple[Part, ...]
    scale: float
    outputs: int  # N of all projections


class Scratch:
    """Memory that dequantized weights share: it grows to the largest and is kept."""

    def __init__(self) -> None:
        self._held: Tensor | None = None

    def matrix(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Undefined content, overwritten by the next user."""
        count = shape[0] * shape[1]
        held = self._held
        if held is None or held.numel() < count or held.dtype != dtype or held.device != device:
            self._held = held = None  # given back first
            self._held = held = torch.empty(count, dtype=dtype, device=device)
        return held[:count].view(shape)


def quant_linear(
    x: Tensor,
    dequantize: Dequantize,
    bias: Tensor | None = None,
    adapter: Adapter | None = None,
    masters: tuple[Tensor, ...] = (),
    gated: bool = False,
) -> Tensor:
    """x [T, K] -> [T, N]; gated: x [T, 2K], gate first. masters: float32 A and B of each part, which get gradients."""
    if adapter is None:
        out: Tensor = _Product.apply(swiglu(x) if gated else x, bias, dequantize)  # type: ignore[no-untyped-call]
        return out
    z, inputs = _LowRank.apply(x, adapter, bias, gated, *masters)  # type: ignore[no-untyped-call]
    out = _AddProduct.apply(inputs, z, dequantize)  # type: ignore[no-untyped-call]
    return out


class _Product(torch.autograd.Function):
    """x W^T + bias; nothing is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, dequantize: Dequantize) -> Tensor:
        ctx.dequantize = dequantize
        return F.linear(x, dequantize(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (dy,) = grads
        return dy @ ctx.dequantize(dy.dtype), None, None


class _AddProduct(torch.autograd.Function):
    """z + x W^T, in place of z; nothing is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, dequantize: Dequantize) -> Tensor:
        ctx.dequantize = dequantize
        ctx.mark_dirty(z)
        return z.addmm_(x, dequantize(x.dtype).t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, None]:
        (dy,) = grads
        return dy @ ctx.dequantize(dy.dtype) if ctx.needs_input_grad[0] else None, dy, None


class _LowRank(torch.autograd.Function):
    """z = bias + LoRA, and the input as the product takes it: its gradient comes back here, and LoRA's is added."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, adapter: Adapter, bias: Tensor | None, gated: bool, *masters: Tensor
    ) -> tuple[Tensor, Tensor]:
        inputs = swiglu_forward(x) if gated else x.view_as(x)
        u = (inputs @ adapter.a.t()).mul_(adapter.scale)
        z = x.new_empty(len(x), adapter.outputs)
        if sum(len(part.b) for part in adapter.parts) < adapter.outputs:  # some projections have no LoRA
            z.copy_(bias) if bias is not None else z.zero_()
        for part in adapter.parts:
            into, inner = z[:, part.columns], u[:, part.rows]
            if bias is None:
                torch.mm(inner, part.b.t(), out=into)
            else:
                torch.addmm(bias[part.columns], inner, part.b.t(), out=into)
        ctx.adapter, ctx.gated = adapter, gated
        ctx.save_for_backward(x, u)
        ctx.set_materialize_grads(False)
        if not ctx.needs_input_grad[0]:  # else LoRA's own would make it look as if it needed one
            ctx.mark_non_differentiable(inputs)
        return z, inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (dz, dinputs), (x, u), adapter = grads, ctx.saved_tensors, ctx.adapter
        assert dz is not None
        whole = sum(part.b.shape[1] for part in adapter.parts) == u.shape[1]  # else some rows of A belong to no part
        du = torch.empty_like(u) if whole else torch.zeros_like(u)
        for part in adapter.parts:
            torch.mm(dz[:, part.columns], part.b, out=du[:, part.rows])
        du.mul_(adapter.scale)
        if dinputs is not None:
            dinputs.addmm_(du, adapter.a)  # nobody else has it: `_AddProduct` made it for us
        if ctx.gated and dinputs is not None:
            swiglu_backward(x, dinputs)  # x is its own gradient now, and dinputs what the product took
            inputs, dx = dinputs, x.detach()
        else:
            inputs, dx = swiglu_forward(x) if ctx.gated else x, dinputs
        da, db = float32_product(du.t(), inputs.t()), float32_product(dz.t(), u.t())
        masters = [grad for part in adapter.parts for grad in (da[part.rows], db[part.columns, part.rows])]
        return dx, None, None, None, *masters
