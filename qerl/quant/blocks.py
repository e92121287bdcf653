"""What the block formats share: a weight seen as rows of blocks, its checks, and the search for a better scale.

A block is a run of consecutive inputs that shares one scale. All arithmetic is float32, whatever the input's dtype.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# A candidate scale must beat round-to-nearest by more than the rounding error of the differences that are compared
# (float32, about 2e-7 each), so that "never worse" also holds in exact arithmetic.
MARGIN = 1.0 - 2.0**-20


def to_blocks(weight: Tensor, block: int, name: str) -> Tensor:
    """`weight` [..., K] as float32 blocks [n, block]. Refuses what no block format can hold."""
    if weight.dtype not in FLOAT_DTYPES:
        raise ValueError(f"{name} has dtype {weight.dtype}; a weight to quantize must be float32, bfloat16 or float16.")
    if weight.dim() == 0 or weight.numel() == 0:
        raise ValueError(f"{name} has shape {tuple(weight.shape)}: there is nothing to quantize.")
    if weight.shape[-1] % block:
        raise ValueError(
            f"{name} has {weight.shape[-1]} inputs (K), which blocks of {block} do not divide. "
            f"Leave it in 16 bits: --ignore '{name.removesuffix('.weight')}'."
        )
    return weight.detach().to(torch.float32).reshape(-1, block)


def block_absmax(blocks: Tensor, name: str) -> Tensor:
    """Largest magnitude of each block, [n]. NaN and Inf are refused by the tensor's name."""
    # Magnitudes order alike as floats and as integers, NaN above Inf; integer maxima are the faster ones on a CPU.
    absmax = blocks.abs().view(torch.int32).amax(-1).view(torch.float32)
    if not bool(torch.isfinite(absmax).all()):
        raise ValueError(f"{name} holds NaN or Inf; such a weight can't be quantized. Check or re-download the model.")
    return absmax


def search_scales(
    blocks: Tensor,
    absmax: Tensor,
    first: Tensor,
    candidates: Iterable[Tensor],
    step: Callable[[Tensor], Tensor],
    round_to_grid: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Per block, the candidate scale with the least squared error; `first` (round-to-nearest) unless one beats it.

    blocks [n, block] float32 (magnitudes are enough for a symmetric grid); absmax [n] their largest magnitudes; first
    [n] and each candidate [n] in the scale's own dtype; step(scale) [n, 1] float32: what one unit of the grid is worth;
    round_to_grid(x, step) [n, block]: x after quantizing with that step.

    Each block is lifted by a power of two to about 1, which is exact, so that neither huge nor tiny weights leave
    float32's range when squared. Sums are float64, so that the choice hardly depends on the order of adding. Blocks
    below 2**-100, where float32 itself becomes coarse, keep `first`.
    """
    exponent = torch.frexp(absmax).exponent.clamp(min=-120)[:, None]
    lift = torch.ldexp(torch.ones_like(absmax)[:, None], -exponent)
    x = blocks * lift

    def error(scale: Tensor) -> Tensor:
        return round_to_grid(x, step(scale) * lift).sub_(x).square_().sum(-1, dtype=torch.float64)

    best, least = first, error(first).mul_(MARGIN).masked_fill_(absmax < 2.0**-100, 0.0)
    for scale in candidates:
        e = error(scale)
        better = e < least
        best = torch.where(better, scale, best)
        least = torch.where(better, e, least)
    return best
