"""RMSNorm with optional noise beside the gain.

    y = cast((w + z) * x / sqrt(mean(x^2) + eps))          all in float32, one cast to x's dtype

The noise z is a vector of its own, never a change of w. With z = 0 the result is bit for bit that without noise.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, noise_D: Tensor | None = None) -> Tensor:
    """x [..., D] any float dtype; weight_D float32 [D]; noise_D float32 [D] or None -> [..., D] in x's dtype."""
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    gain_D = weight_D if noise_D is None else weight_D + noise_D
    return (gain_D * normed).to(x.dtype)
