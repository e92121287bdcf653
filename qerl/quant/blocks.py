"""What the block formats share: a weight seen as rows of blocks, its checks, and the search for a better scale.

A block is a run of consecutive inputs that shares one scale. All arithmetic is float32, whatever the input's dtype.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# A candidate scale must beat round-to-nearest by more than the rounding error of the float32 sums that compare them
# (about 1.2e-6 for blocks of 64), so that "never worse" also holds in exact arithmetic.
MARGIN = 1.0 - 2.0**-16


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
    return weight.to(torch.float32).reshape(-1, block)


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
    round_trip: Callable[[Tensor], Tensor],
) -> Tensor:
    """Per block, the candidate scale with the least squared error; `first` (round-to-nearest) unless one beats it.

    blocks [n, block] float32; absmax [n] their largest magnitudes; first [n] and each candidate [n] in the scale's own
    dtype; `round_trip(scale)` gives the blocks after quantizing with that scale, [n, block] float32.
    Errors are measured relative to the block's absmax, so neither huge nor tiny weights leave float32's range.
    """
    unit = torch.where(absmax > 0, absmax, torch.ones_like(absmax))[:, None]

    def error(scale: Tensor) -> Tensor:
        return ((round_trip(scale) - blocks) / unit).square_().sum(-1)

    best, least = first, error(first) * MARGIN
    for scale in candidates:
        e = error(scale)
        better = e < least
        best = torch.where(better, scale, best)
        least = torch.where(better, e, least)
    return best
