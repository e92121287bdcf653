"""RMSNorm with optional noise beside the gain, and with the residual addition in front of it.

    s = cast(x + delta)        y = cast((w + z) * s / sqrt(mean(s^2) + eps))      in float32, one cast each

The noise z is a vector of its own, never a change of w. With z = 0 the result is bit for bit that without noise.
"""

import torch
from torch import Tensor

from qerl.kernels.choice import fused


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, noise_D: Tensor | None = None) -> Tensor:
    """x [..., D] any float dtype; weight_D float32 [D]; noise_D float32 [D] or None -> [..., D] in x's dtype."""
    if fused(x, weight_D, noise_D):
        from qerl.kernels.gpu import rms_norm as gpu

        return gpu.add_rms_norm(x, None, weight_D, eps, noise_D)[1]
    return rms_norm_reference(x, weight_D, eps, noise_D)


def add_rms_norm(
    x: Tensor, delta: Tensor, weight_D: Tensor, eps: float, noise_D: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x + delta, and its norm: both [..., D] in x's dtype; delta of x's shape and dtype, the rest as in `rms_norm`."""
    if fused(x, delta, weight_D, noise_D):
        from qerl.kernels.gpu import rms_norm as gpu

        return gpu.add_rms_norm(x, delta, weight_D, eps, noise_D)
    total = x + delta
    return total, rms_norm_reference(total, weight_D, eps, noise_D)


def rms_norm_reference(x: Tensor, weight_D: Tensor, eps: float, noise_D: Tensor | None = None) -> Tensor:
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    gain_D = weight_D if noise_D is None else weight_D + noise_D
    return (gain_D * normed).to(x.dtype)
