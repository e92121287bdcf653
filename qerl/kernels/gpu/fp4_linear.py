"""y = x W^T + bias + LoRA on a GPU, without gradients: which kernel.

On Hopper up to 8 rows `fp4_skinny`, up to some 1500 `fp4_wgmma` (CUDA C++, where there is a compiler); on other
GPUs, and for odd weights, up to some hundreds `fp4_tiled` (Triton). Beyond, the weight is written out in bf16 at memory
speed and cuBLAS multiplies.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from qerl.kernels.fp4_tiles import Tiles
from qerl.kernels.gpu.fp4_skinny import skinny_linear, skinny_plan, skinny_serves
from qerl.kernels.gpu.fp4_tiled import dequantize_tiles, plan_for, tiled_linear
from qerl.kernels.gpu.fp4_wgmma import wgmma_linear, wgmma_plan, wgmma_serves
from qerl.kernels.gpu.launch import processors
from qerl.kernels.gpu.low_rank import add_low_rank
from qerl.kernels.gpu.swiglu import swiglu
from qerl.kernels.low_rank import LowRank

DENSE_FROM = 768  # rows from which dequantization pays, against Triton's kernel


def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None, low: LowRank | None, paired: bool) -> Tensor:
    """The same for a weight in bf16: cuBLAS, and LoRA in two launches."""
    y = F.linear(x, weight, bias)
    if low is not None:
        add_low_rank(y, x, low)
    return swiglu(y) if paired else y


def fp4_linear(
    x: Tensor, tiles: Tiles, bias: Tensor | None = None, low: LowRank | None = None, paired: bool = False
) -> Tensor:
    """x bf16 [M, K] -> bf16 [M, N]; paired: silu(first half) * second half, [M, N / 2]."""
    rows, joined = len(x), paired and tiles.interleaved  # joined: in the product's own launch, on Hopper
    aligned = x.stride(-1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0  # as the copy engine wants it
    x = x if aligned else x.clone(memory_format=torch.contiguous_format)
    if skinny_serves(x, low):
        y = skinny_linear(x, tiles, bias, low, joined, skinny_plan(tiles, low, processors(x)))
    elif wgmma_serves(x, tiles, low):
        y = wgmma_linear(x, tiles, bias, low, joined, wgmma_plan(len(tiles.words), tiles.words.shape[1], rows))
    elif rows < DENSE_FROM:
        y = tiled_linear(x, tiles, bias, low, plan_for(rows, tiles, low.sizes if low is not None else ()))
        joined = False
    else:
        return dense_linear(x, dequantize_tiles(tiles), bias, low, paired)
    return swiglu(y) if paired and not joined else y
