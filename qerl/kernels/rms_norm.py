"""RMSNorm with optional noise beside the gain, and with the residual addition in front of it.

    s = cast(x + delta)        y = cast((w + z) * s / sqrt(mean(s^2) + eps))      in float32, one cast each

The noise z is a vector of its own, never a change of w. With z = 0 the result is bit for bit that without noise. The
backward pass keeps s alone, and adds the gradient of s from elsewhere (the residual's) in the same operation.
"""

from typing import Any

import torch
from torch import Tensor

from qerl.kernels.choice import fused


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, noise_D: Tensor | None = None) -> Tensor:
    """x [..., D] any float dtype; weight_D float32 [D]; noise_D float32 [D] or None -> [..., D] in x's dtype."""
    return add_rms_norm(x, None, weight_D, eps, noise_D)[1]


def add_rms_norm(
    x: Tensor, delta: Tensor | None, weight_D: Tensor, eps: float, noise_D: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x + delta (x itself where delta is None), and its norm: both [..., D] in x's dtype; delta of x's shape and dtype,
    the rest as in `rms_norm`."""
    if fused(x, delta, weight_D, noise_D):
        from qerl.kernels.gpu import rms_norm as gpu

        return gpu.add_rms_norm(x, delta, weight_D, eps, noise_D)
    total, normed = _AddRmsNorm.apply(x, delta, weight_D, eps, noise_D)  # type: ignore[no-untyped-call]
    return total, normed


def rms_norm_reference(x: Tensor, weight_D: Tensor, eps: float, noise_D: Tensor | None = None) -> Tensor:
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    gain_D = weight_D if noise_D is None else weight_D + noise_D
    return (gain_D * normed).to(x.dtype)


def rms_norm_backward_reference(
    total: Tensor, weight_D: Tensor, eps: float, noise_D: Tensor | None, dtotal: Tensor | None, dy: Tensor, trains: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradient of x + delta, where dtotal comes from elsewhere and dy through the norm; and the gain's."""
    wide, dy = total.to(torch.float32), dy.to(torch.float32)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = wide * scale
    through = (weight_D if noise_D is None else weight_D + noise_D) * dy
    dx = scale * (through - normed * (through * normed).mean(-1, keepdim=True))
    dx = dx if dtotal is None else dx + dtotal
    return dx.to(total.dtype), (dy * normed).flatten(0, -2).sum(0) if trains else None


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, weight_D: Tensor, eps: float, noise_D: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if x.is_cuda:
            from qerl.kernels.gpu import rms_norm as gpu

            total, normed = gpu.add_rms_norm(x, delta, weight_D, eps, noise_D)
        else:
            total = x if delta is None else x + delta
            normed = rms_norm_reference(total, weight_D, eps, noise_D)
        total = x.view_as(x) if delta is None else total
        ctx.save_for_backward(total, weight_D, noise_D)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        (dtotal, dy), (total, weight_D, noise_D) = grads, ctx.saved_tensors
        trains = ctx.needs_input_grad[2]
        added = ctx.needs_input_grad[1]
        if dy is None:  # the norm itself was not used
            return dtotal, dtotal if added else None, None, None, None
        if total.is_cuda:
            from qerl.kernels.gpu import rms_norm as gpu

            dx, dgain_D = gpu.rms_norm_backward(total, weight_D, ctx.eps, noise_D, dtotal, dy, trains)
        else:
            dx, dgain_D = rms_norm_backward_reference(total, weight_D, ctx.eps, noise_D, dtotal, dy, trains)
        return dx, dx if added else None, dgain_D, None, None
