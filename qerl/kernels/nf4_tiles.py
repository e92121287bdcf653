"""How GPU kernels want NF4 weights to lie in memory: a step of its own, exact and invertible.

Strips of 16 rows and tiles of 64 inputs as in `fp4_tiles`: lane 4 g + t of a warp holds rows g and g + 8, and of every
16 inputs 2t, 2t + 1, 2t + 8 and 2t + 9, so that what a lane loads is what it multiplies. A word of 32 bits holds the
eight codes of one k16: in the low half the even inputs, in the high half the odd ones, the pair j = (row half) +
2 (input half) at bits 4 j of either. A tile's inputs are one block of the format: 16 float32 absmax. Double-quantized
ones are dequantized here: .37 bits a weight more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from qerl.kernels.fp4_tiles import INPUTS, ROWS, STRIPS, at_a_time
from qerl.quant import nf4
from qerl.quant.nf4 import NF4


@dataclass(frozen=True)
class Nf4Tiles:
    """Matrices of one K in NF4, one below the other, as kernels read them."""

    words: Tensor  # int32 [strips, K/64, 8 g, 4 t, 4 k16]
    absmax: Tensor  # float32 [strips, K/64, 8 g, 2]: of rows g and g + 8
    table: Tensor  # float32 [16]: what codes stand for
    shape: tuple[int, int]  # N, K; rows are padded to a multiple of 64


def tile_nf4(parts: Sequence[NF4]) -> Nf4Tiles | None:
    """The parts, fused along N. None where a row of the weight is no whole number of blocks, or blocks are shorter than
    a tile."""
    inputs = parts[0].shape[1]
    if any(part.block % INPUTS or inputs % part.block for part in parts):
        return None
    packed = torch.cat([part.packed.view(part.shape[0], inputs // 2) for part in parts])
    absmax_NB = torch.cat([_absmax(part) for part in parts])
    outputs, rows = len(packed), -len(packed) % (ROWS * STRIPS)
    packed, absmax_NB = F.pad(packed, (0, 0, 0, rows)), F.pad(absmax_NB, (0, 0, 0, rows))
    strips, k_tiles = len(packed) // ROWS, inputs // INPUTS
    words = torch.empty(strips, k_tiles, 8, 4, 4, dtype=torch.int32, device=packed.device)
    step = max(1, at_a_time(outputs * inputs) // (ROWS * inputs))
    for start in range(0, strips, step):
        end = min(strips, start + step)
        words[start:end] = _words(nf4.unpack(packed[start * ROWS : end * ROWS]).view(-1, inputs))
    absmax = absmax_NB.view(strips, 2, 8, k_tiles).permute(0, 3, 2, 1).contiguous()
    return Nf4Tiles(words, absmax, nf4.codebook(packed.device), (outputs, inputs))


def untile_nf4(tiles: Nf4Tiles) -> tuple[Tensor, Tensor]:
    """Codes uint8 [N, K] and absmax float32 [N, K/64]: what was tiled, without the padding."""
    words, rows = tiles.words, len(tiles.words) * ROWS
    codes = torch.stack([words >> 4 * j + 16 * k0 & 15 for j in range(4) for k0 in range(2)], -1).to(torch.uint8)
    codes = codes.view(*words.shape, 2, 2, 2)  # strip, tile, g, t, k16, input half, row half, k0
    codes_NK = codes.permute(0, 6, 2, 1, 4, 5, 3, 7).reshape(rows, -1)
    absmax_NB = tiles.absmax.permute(0, 3, 2, 1).reshape(rows, -1)
    return codes_NK[: tiles.shape[0]], absmax_NB[: tiles.shape[0]]


def _absmax(part: NF4) -> Tensor:
    """float32 [N, K/64]."""
    flat = part.absmax if isinstance(part.absmax, Tensor) else part.absmax.dequantize()
    return flat.view(part.shape[0], -1).repeat_interleave(part.block // INPUTS, 1)


def _words(codes_NK: Tensor) -> Tensor:
    """uint8 codes -> int32 [strips, K/64, 8, 4, 4]."""
    rows, inputs = codes_NK.shape
    split = codes_NK.view(
        rows // ROWS, 2, 8, inputs // INPUTS, 4, 2, 4, 2
    )  # strip, row half, g, tile, k16, half, t, k0
    order = split.permute(0, 3, 2, 6, 4, 5, 1, 7).to(torch.int32)  # strip, tile, g, t, k16, input half, row half, k0
    pairs = order[..., 0] | order[..., 1] << 16
    return pairs[..., 0, 0] | pairs[..., 0, 1] << 4 | pairs[..., 1, 0] << 8 | pairs[..., 1, 1] << 12
