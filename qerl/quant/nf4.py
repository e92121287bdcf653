"""NF4 (QLoRA, arXiv 2305.14314): codes into a table of 16 normal quantiles, one absmax for 64 consecutive weights.

    code = nearest entry of CODEBOOK to W / absmax (ties to the lower)          W_hat = CODEBOOK[code] * absmax

Layout and corner rules are bitsandbytes': blocks run over the flattened tensor (the last may be short), two codes lie
in a byte with the first in the high nibble. 4.5 bits a weight with a float32 absmax, 4.13 with double quantization,
which stores absmax minus its mean in 8 bits: a 256-entry "dynamic" table and one float32 absmax for 256 of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from qerl.quant.blocks import FLOAT_DTYPES, block_absmax, search_scales
from qerl.quant.e2m1 import aligned

__all__ = ["BLOCK", "NF4", "Nested", "codebook", "dequantize", "nest", "pack", "quantize", "unpack"]

BLOCK = 64
NESTED_BLOCK = 256
NESTED_GRID = 65535  # bitsandbytes' CPU path finds the 8-bit code through a table of this many steps over [-1, 1]
SMALLEST_ABSMAX = 1e-38  # what a smaller absmax counts as in the division

# Quantiles of N(0, 1) scaled to [-1, 1], with an exact zero: figures of QLoRA's appendix E as float32.
CODEBOOK = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip

# What `mse` multiplies a block's absmax by: below 1 the maximum is clipped; 1/0.723 puts it on the table's second
# entry, NF4's form of "four over six".
SEARCH_FACTORS = (0.8, 0.85, 0.9, 0.95, 1.05, 1.1, 1.2, 1 / CODEBOOK[14])


@dataclass(frozen=True)
class Nested:
    """A double-quantized absmax: absmax = table[code] * absmax_of_256 + offset."""

    code: Tensor  # uint8 [blocks]
    absmax: Tensor  # float32 [ceil(blocks / 256)]
    table: Tensor  # float32 [256], ascending
    offset: Tensor  # float32 []

    def dequantize(self) -> Tensor:
        scale = self.absmax.repeat_interleave(NESTED_BLOCK)[: self.code.numel()]
        return self.table[self.code.to(torch.int32)] * scale + self.offset


@dataclass(frozen=True)
class NF4:
    """A weight of any shape in NF4."""

    packed: Tensor  # uint8 [ceil(numel / 2)], the first code in the high nibble
    absmax: Tensor | Nested  # float32 [ceil(numel / block)], or double-quantized
    shape: tuple[int, ...]
    block: int = BLOCK


@cache  # brought to a device once: a captured graph must not copy from the host
def codebook(device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(CODEBOOK, dtype=torch.float32, device=device)


def quantize(weight: Tensor, method: str = "rtn", double_quant: bool = False, name: str = "weight") -> NF4:
    """weight of any shape -> NF4. method and name as in `nvfp4.quantize`; double_quant stores absmax in 8 bits."""
    if weight.dtype not in FLOAT_DTYPES:
        raise ValueError(f"{name} has dtype {weight.dtype}; a weight to quantize must be float32, bfloat16 or float16.")
    if weight.numel() == 0:
        raise ValueError(f"{name} has shape {tuple(weight.shape)}: there is nothing to quantize.")
    if method not in ("rtn", "mse"):
        raise ValueError(f"Unknown rounding method {method!r}; NF4 knows rtn and mse.")
    flat = weight.detach().to(torch.float32).flatten()
    full = flat.numel() - flat.numel() % BLOCK
    codes, scales = [], []
    for part in (flat[:full].view(-1, BLOCK), flat[full:].view(1, -1)):
        if part.numel():
            code, absmax = _quantize_blocks(part, method, name)
            codes.append(code.flatten())
            scales.append(absmax)
    absmax = torch.cat(scales)
    return NF4(pack(torch.cat(codes)), nest(absmax) if double_quant else absmax, tuple(weight.shape))


def dequantize(q: NF4, dtype: torch.dtype = torch.float32) -> Tensor:
    """NF4 -> weight, computed in float32 and cast once."""
    absmax = q.absmax.dequantize() if isinstance(q.absmax, Nested) else q.absmax
    numel = torch.Size(q.shape).numel()
    values = codebook(q.packed.device).index_select(0, unpack(q.packed)[:numel].to(torch.int32))
    return (values * absmax.repeat_interleave(q.block)[:numel]).view(q.shape).to(dtype)


def nest(absmax: Tensor) -> Nested:
    """Double quantization: float32 absmax [blocks] -> 8 bits each, in blocks of 256, around their mean."""
    offset = absmax.mean()
    if not bool(torch.isfinite(offset)):
        raise ValueError("The weight's magnitudes are too large for double quantization; leave double_quant off.")
    table = dynamic_table(absmax.device)
    centred = absmax - offset
    padded = torch.nn.functional.pad(centred.abs(), (0, -centred.numel() % NESTED_BLOCK))
    scale = padded.view(-1, NESTED_BLOCK).amax(-1)
    unit = scale.repeat_interleave(NESTED_BLOCK)[: centred.numel()]
    scaled = (centred * (1.0 / unit)).nan_to_num_(nan=-1.0).clamp_(-1, 1)  # 0 * inf, in a block of zeros, has code 0
    snapped = ((scaled + 1) * (0.5 * NESTED_GRID) + 0.5).floor_() * (2 / NESTED_GRID) - 1
    return Nested(_nearest(snapped, table), scale, table, offset)


def dynamic_table(device: torch.device | str = "cpu") -> Tensor:
    """The signed 8-bit "dynamic" table (Dettmers, arXiv 1511.04561): seven decades below 1, the d-th holding 2**d
    evenly spaced means of either sign, besides 0 and 1."""
    entries = [torch.tensor([0.0, 1.0], dtype=torch.float32)]
    for decade in range(7):
        edges = torch.linspace(0.1, 1.0, 2**decade + 1, dtype=torch.float32)
        means = (edges[:-1] + edges[1:]) / 2.0 * 10.0 ** (decade - 6)
        entries += [means, -means]
    return torch.cat(entries).sort().values.to(device)


def pack(code: Tensor) -> Tensor:
    """uint8 codes [n] -> bytes [ceil(n / 2)], the first in the high nibble; an odd tail gets code 7 (zero)."""
    if code.numel() % 2:
        code = torch.cat((code, code.new_tensor([7])))
    pair = aligned(code).view(torch.int16)  # little-endian: low byte = first code
    return ((pair << 4) | (pair >> 8)).to(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """bytes [m] -> uint8 codes [2m]."""
    return torch.stack((packed >> 4, packed & 0xF), dim=-1).flatten()


def _quantize_blocks(blocks: Tensor, method: str, name: str) -> tuple[Tensor, Tensor]:
    absmax = block_absmax(blocks, name)
    table = codebook(blocks.device)
    short = blocks.shape[1] < BLOCK  # a tensor's tail: divided, not multiplied by a reciprocal, and its floor stored
    if short:
        absmax = absmax.clamp(min=SMALLEST_ABSMAX)

    def encode(x: Tensor, step: Tensor) -> Tensor:
        unit = step.clamp(min=SMALLEST_ABSMAX)
        return _nearest((x / unit if short else x * (1.0 / unit)).clamp_(-1, 1), table)

    def round_to_grid(x: Tensor, step: Tensor) -> Tensor:
        return table.index_select(0, encode(x, step).flatten().to(torch.int32)).view(x.shape) * step

    if method == "mse":
        absmax = search_scales(blocks, absmax, absmax, _candidates(absmax), lambda s: s[:, None], round_to_grid)
    return encode(blocks, absmax[:, None]), absmax


def _candidates(absmax: Tensor) -> Iterator[Tensor]:
    for factor in SEARCH_FACTORS:
        yield (absmax * factor).clamp_(max=torch.finfo(torch.float32).max)


def _nearest(x: Tensor, table: Tensor) -> Tensor:
    """Index of the entry of an ascending table nearest to x, ties to the lower; uint8."""
    middles = (table[:-1] + table[1:]) / 2
    return torch.bucketize(x, middles, out_int32=True).to(torch.uint8)
