"""Rows read by index, one row as often as is asked for; the gradients of a row's copies are added up.

    y_n = x[rows_n]          dx_t = sum of dy_n over the copies n of t

The sum is in float32 and always in the same order, one walk over its copies for each row of dx: no atomic additions, as
index_select's backward makes them on a GPU, and no sort at each call, as indexing's makes.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Copies:
    """Of which of T rows each of N is a copy, and where the copies of each row are."""

    rows_N: Tensor  # int64
    sorted_N: Tensor  # int64: the copies, by the row they are of
    starts_T: Tensor  # int64: where those of each row begin in sorted_N


def copies(rows_N: Tensor, count: int, device: torch.device | str = "cpu") -> Copies:
    """rows_N int64, each below count."""
    ordered_N, sorted_N = torch.sort(rows_N, stable=True)
    starts_T = torch.searchsorted(ordered_N, torch.arange(count, device=rows_N.device))
    return Copies(rows_N.to(device), sorted_N.to(device), starts_T.to(device))


def expand(x: Tensor, made: Copies) -> Tensor:
    """x [T, ...], of two dimensions or more -> [N, ...] of the same dtype, contiguous. Gradients: x."""
    out: Tensor = _Expand.apply(x, made)  # type: ignore[no-untyped-call]
    return out


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, made: Copies) -> Tensor:
        ctx.made = made
        return x.index_select(0, made.rows_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        made, dy = ctx.made, grads[0]
        # A bag for each row, which is the sum of its copies; none where there are none.
        dx_TM = F.embedding_bag(made.sorted_N, dy.flatten(1), made.starts_T, mode="sum")
        return dx_TM.view(-1, *dy.shape[1:]), None
