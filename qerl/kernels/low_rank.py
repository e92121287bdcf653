"""LoRA of one or several fused projections, as kernels read it: A's stacked, B's one below the other.

y += scale (x A^T) B^T            rows of part p of y see the `rank` rows of A from p * rank on
"""

from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 64  # of y for which kernels look up their adapter once


@dataclass(frozen=True)
class LowRank:
    """A and B of the parts of a fused projection, in the compute dtype; refreshed in place after each update."""

    a: Tensor  # [parts * rank, K]
    b: Tensor  # [N, rank]
    column: Tensor  # int32 [N/ROWS + 1]: first row of A for each ROWS of y; last, the rows of A in all
    scale: float
    sizes: tuple[int, ...]  # N of each part

    @property
    def rank(self) -> int:
        return self.b.shape[1]


def kernels_take(sizes: tuple[int, ...]) -> bool:
    """Whether every part begins at a multiple of `ROWS`, so that no such rows have two adapters."""
    return all(size % ROWS == 0 for size in sizes[:-1])


def low_rank_buffers(
    sizes: tuple[int, ...], inputs: int, rank: int, scale: float, dtype: torch.dtype, device: torch.device
) -> LowRank:
    """Room for adapters of a rank, all zero. The rank is padded to 16, 32, 64, ...: tensor cores want that."""
    padded = max(16, 1 << (rank - 1).bit_length())
    a = torch.zeros(len(sizes) * padded, inputs, dtype=dtype, device=device)
    b = torch.zeros(sum(sizes), padded, dtype=dtype, device=device)
    column = [part * padded for part, size in enumerate(sizes) for _ in range(-(-size // ROWS))]
    return LowRank(a, b, torch.tensor([*column, len(a)], dtype=torch.int32, device=device), scale, sizes)


def low_rank_reference(x: Tensor, low: LowRank) -> Tensor:
    """x [..., K] -> [..., N]."""
    inner = torch.chunk(x @ low.a.t(), len(low.sizes), dim=-1)
    parts = zip(inner, torch.split(low.b, list(low.sizes)), strict=True)
    return torch.cat([part @ b.t() for part, b in parts], dim=-1) * low.scale
