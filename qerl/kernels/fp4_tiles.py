"""How GPU kernels want NVFP4 and MXFP4 weights to lie in memory: a step of its own, exact and invertible.

A weight [N, K] is cut into strips of 16 rows, a strip into tiles of 64 inputs. A tile is 512 bytes of codes, 16 for
each of a warp's 32 lanes, in the order of the tensor cores' left operand (m16k16): lane 4 g + t holds rows g and g + 8,
and of every 16 inputs 2t, 2t + 1, 2t + 8 and 2t + 9. So what a lane loads is what it multiplies.

A word of 32 bits holds eight codes of one k16: low half the even inputs, high half the odd ones, and in each half the
pairs j = (row half) + 2 (input half), placed so that a shift and a mask make a bf16 of magnitude |code| 2^-126:

    bit    15  14  13  12  11  10   9   8..6   5..3   2..0           s: sign    e, m: the magnitude's three bits, eem
    j=0     s                          eem
    j=1                 s                     eem
    j=2                             s                 eem
    j=3         s   m       e   e

Scales become a byte each, 5 bits of exponent and 3 of mantissa: bf16 bits 0x7000 | byte << 4 are the scale times 2^119.
Code times scale is then exact in bf16, times 2^-7. What is left of the scale, one number a row, divides the sum.
MXFP4 has its scale of 32 inputs twice, relative to the largest of the matrix.

Gate and up are interleaved: strip s holds rows 8s to 8s + 7 of gate, then the same of up. Whoever has rows g and g + 8
of a strip, as the tensor cores leave sums, has both that make one output of SwiGLU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from qerl.quant import e2m1
from qerl.quant.mxfp4 import MXFP4
from qerl.quant.nvfp4 import NVFP4

ROWS, INPUTS = 16, 64  # of a tile
STRIPS = 4  # kernels take 64 rows at a time: N is padded to that
TOP = 8  # log2 of MXFP4's largest scale, after normalisation
OCTAVES = 30  # between the largest and the smallest scale that a byte can tell
LEAST, MOST = 1 << 19, 1 << 23  # weights that are rearranged at a time: temporaries take some 25 bytes each


@dataclass(frozen=True)
class Tiles:
    """Matrices of one K in 4 bits, one below the other, as kernels read them."""

    words: Tensor  # int32 [strips, K/64, 8 g, 4 t, 4 k16]
    scales: Tensor  # int32 [strips, K/64, 8 g, 2]: bytes (row g, row g + 8) of an even k16, then of an odd one
    divisor_N: Tensor  # float32 [rows, padding included]: what each row's sum is divided by; in the strips' order
    shape: tuple[int, int]  # N, K without padding
    interleaved: bool = False  # gate and up, eight rows of each by turns; then there is no padding of rows


def tile(parts: Sequence[NVFP4 | MXFP4], paired: bool = False) -> Tiles | None:
    """The parts, fused along N. None where scales of MXFP4 lie further apart than a byte can tell.

    paired: the halves of the rows are gate and up, to be interleaved if they are multiples of 64, as kernels work.
    """
    inputs = parts[0].shape[1]
    found = [_relative_scales(part) for part in parts]
    if any(scales is None for scales, _ in found):
        return None
    scales_NB = torch.cat([scales for scales, _ in found if scales is not None])
    divisor_N = torch.cat([divisor.expand(part.shape[0]) for part, (_, divisor) in zip(parts, found, strict=True)])
    packed = torch.cat([part.packed for part in parts])
    outputs = len(packed)
    interleaved = paired and outputs % (2 * ROWS * STRIPS) == 0
    if interleaved:
        packed, scales_NB, divisor_N = (_interleave(rows) for rows in (packed, scales_NB, divisor_N))
    rows, columns = -len(packed) % (ROWS * STRIPS), -inputs % INPUTS
    packed = F.pad(packed, (0, columns // 2, 0, rows))
    scales_NB = F.pad(scales_NB, (0, columns // 16, 0, rows))
    divisor_N = F.pad(divisor_N, (0, rows), value=1.0)
    strips = len(packed) // ROWS
    words = torch.empty(strips, packed.shape[1] // 32, 8, 4, 4, dtype=torch.int32, device=packed.device)
    step = max(1, at_a_time(2 * packed.numel()) // (ROWS * 2 * packed.shape[1]))
    for start in range(0, strips, step):
        end = min(strips, start + step)
        at = slice(start * ROWS, end * ROWS)
        codes = e2m1.unpack(packed[at]).masked_fill_((scales_NB[at] == 0).repeat_interleave(16, 1), 0)
        words[start:end] = _words(codes)
    return Tiles(words, _scale_words(scales_NB), divisor_N.contiguous(), (outputs, inputs), interleaved)


def at_a_time(weights: int) -> int:
    """Of so many weights, how many to rearrange together: temporaries stay small beside a layer in 16 bits."""
    return min(MOST, max(LEAST, weights // 16))


def untile(tiles: Tiles) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 [N, K], the scales' bytes uint8 [N, K/16] and divisors [N]: what was tiled, without the padding."""
    words, rows = tiles.words, tiles.words.shape[0] * ROWS
    pairs = [_field(words, j, half) for j in range(4) for half in range(2)]
    codes = torch.stack(pairs, -1).view(*words.shape, 2, 2, 2)  # strip, tile, g, t, k16, input half, row half, k0
    codes_NK = codes.permute(0, 6, 2, 1, 4, 5, 3, 7).reshape(rows, -1)
    bytes_ = torch.stack([(tiles.scales >> shift & 255).to(torch.uint8) for shift in (0, 8, 16, 24)], -1)
    scales_NB = bytes_.view(*tiles.scales.shape, 2, 2).permute(0, 5, 2, 1, 3, 4).reshape(rows, -1)
    found = codes_NK[:, : tiles.shape[1]], scales_NB[:, : tiles.shape[1] // 16], tiles.divisor_N
    codes, scales, divisor = (_take_apart(rows) if tiles.interleaved else rows[: tiles.shape[0]] for rows in found)
    return codes, scales, divisor


def decode_scales(scales: Tensor) -> Tensor:
    """The scales' bytes -> float32; the byte 0 stands for a block of zeros."""
    return (0x70000000 | scales.to(torch.int32) << 20).view(torch.float32) * 2.0**-119


def _interleave(rows: Tensor) -> Tensor:
    """[N, ...]: eight rows of the first half, eight of the second, and so on."""
    return rows.view(2, -1, ROWS // 2, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def _take_apart(rows: Tensor) -> Tensor:
    """The inverse."""
    return rows.reshape(-1, 2, ROWS // 2, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def _relative_scales(part: NVFP4 | MXFP4) -> tuple[Tensor | None, Tensor]:
    """Scales as bytes [N, K/16], and the divisor [1] that makes them true."""
    if isinstance(part, NVFP4):
        values = part.scale.to(torch.float32)
        if bool((values < 0).any()) or bool(values.isnan().any()):
            raise ValueError("NVFP4 scales must be numbers from 0 up; this checkpoint's are not.")
        return _bytes(values), part.global_scale.to(torch.float32)
    exponents = part.scale.to(torch.int32)
    used = (part.packed.view(*part.scale.shape, -1) & 0x77 != 0).any(-1)  # a block of zeros may have any scale
    top = int(exponents[used].max()) if bool(used.any()) else TOP + 127
    values = torch.where(used, torch.exp2((exponents - top + TOP).to(torch.float32)), 0.0)
    if bool((exponents[used] < top - OCTAVES).any()):
        return None, exponents.new_empty(0)
    return _bytes(values).repeat_interleave(2, 1), torch.full_like(values[0, :1], 2.0 ** (TOP + 127 - top))


def _bytes(values: Tensor) -> Tensor:
    bits = (values * 2.0**119).to(torch.bfloat16).view(torch.int16)
    return torch.where(values == 0, 0, bits >> 4).to(torch.uint8)


def _words(codes_NK: Tensor) -> Tensor:
    """uint8 codes -> int32 [strips, K/64, 8, 4, 4]."""
    rows, inputs = codes_NK.shape
    split = codes_NK.view(
        rows // ROWS, 2, 8, inputs // INPUTS, 4, 2, 4, 2
    )  # strip, row half, g, tile, k16, input half, t
    order = split.permute(0, 3, 2, 6, 4, 5, 1, 7).to(torch.int32)  # strip, tile, g, t, k16, input half, row half, k0
    sign, size = order >> 3, order & 7
    halves = (
        sign[..., 0, 0, :] << 15 | size[..., 0, 0, :] << 6
        | sign[..., 0, 1, :] << 12 | size[..., 0, 1, :] << 3
        | sign[..., 1, 0, :] << 9 | size[..., 1, 0, :]
        | sign[..., 1, 1, :] << 14 | size[..., 1, 1, :] >> 1 << 10 | (size[..., 1, 1, :] & 1) << 13
    )  # fmt: skip
    return halves[..., 0] | halves[..., 1] << 16


def _field(words: Tensor, j: int, half: int) -> Tensor:
    """The codes of pair j in one half of each word, uint8."""
    h = words >> 16 * half
    if j == 3:
        size = (h >> 10 & 3) << 1 | h >> 13 & 1
        return ((h >> 14 & 1) << 3 | size).to(torch.uint8)
    return ((h >> 15 - 3 * j & 1) << 3 | h >> 6 - 3 * j & 7).to(torch.uint8)


def _scale_words(scales_NB: Tensor) -> Tensor:
    """uint8 [N, K/16] -> int32 [strips, K/64, 8, 2]."""
    rows, blocks = scales_NB.shape
    split = scales_NB.view(rows // ROWS, 2, 8, blocks // 4, 2, 2)  # strip, row half, g, tile, k16 / 2, k16 % 2
    b = split.permute(0, 3, 2, 4, 5, 1).to(torch.int32)
    return (b[..., 0, 0] | b[..., 0, 1] << 8 | b[..., 1, 0] << 16 | b[..., 1, 1] << 24).contiguous()
