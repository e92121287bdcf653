"""NVFP4: E2M1 codes, one E4M3 scale for 16 consecutive inputs, one float32 scale for the tensor. 4.5 bits a weight.

    global = 448 * 6 / amax(W)         scale = E4M3(global * amax_block / 6)         code = E2M1(W / (scale/global))
    W_hat  = value(code) * (scale / global)

`global` is a reciprocal, as compressed-tensors stores it (layout `nvfp4-pack-quantized`). Corner rules are that
library's too: a scale that rounds to zero becomes 0.125; a `global` beyond float32 (amax under 8e-36) becomes 1.
Matrices that a serving engine fuses (q,k,v; gate,up) must be given one shared `global`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl.quant import e2m1
from qerl.quant.blocks import block_absmax, search_scales, to_blocks
from qerl.quant.e2m1 import pack, unpack

__all__ = ["BLOCK", "NVFP4", "dequantize", "global_scale", "pack", "quantize", "unpack"]

BLOCK = 16
SCALE_MAX = 448.0  # E4M3's largest value
ROUNDS_TO_ZERO = 2.0**-10  # half of E4M3's smallest positive value
ZERO_SCALE = 0.125  # stands in for a scale that rounds to zero

# E4M3 neighbours of the nearest scale that `mse` tries, in steps of its code (8 an octave). +5 is a factor of about
# 1.5: the block's maximum then lands on 4 instead of 6 ("four over six"); below 0 the maximum is clipped.
SEARCH_STEPS = (-1, 1, 2, 3, 4, 5, 6)


@dataclass(frozen=True)
class NVFP4:
    """A weight of shape [N, K] in NVFP4."""

    packed: Tensor  # uint8 [N, K/2], the even input in the low nibble
    scale: Tensor  # float8_e4m3fn [N, K/16]
    global_scale: Tensor  # float32 [1]

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.packed.shape[:-1], self.packed.shape[-1] * 2)


def global_scale(amax: Tensor) -> Tensor:
    """amax [] or [1], the largest magnitude of a tensor (or of several that share the scale) -> float32 [1]."""
    tiny = torch.finfo(torch.float32).tiny
    scale = SCALE_MAX * e2m1.MAX / amax.to(torch.float32).clamp(min=tiny)
    return torch.nan_to_num(scale, posinf=1.0).reshape(1)


def quantize(weight: Tensor, method: str = "rtn", global_scale_1: Tensor | None = None, name: str = "weight") -> NVFP4:
    """weight [N, K], K a multiple of 16 -> NVFP4.

    method: "rtn" (nearest scale) or "mse" (per block the E4M3 scale of least squared error, never worse than rtn).
    global_scale_1: float32 [1] shared with other tensors; by default the tensor's own. name: for error messages.
    """
    blocks = to_blocks(weight, BLOCK, name)
    absmax = block_absmax(blocks, name)
    if global_scale_1 is None:
        global_scale_1 = global_scale(absmax.amax())
    scale = _nearest_scale(absmax, global_scale_1)
    if method == "mse":
        scale = search_scales(
            blocks.abs(), absmax, scale, _neighbours(scale), lambda s: _step(s, global_scale_1), e2m1.round_magnitudes
        )
    elif method != "rtn":
        raise ValueError(f"Unknown rounding method {method!r}; NVFP4 knows rtn and mse.")
    code = e2m1.encode(blocks / _step(scale, global_scale_1))
    lead, k = weight.shape[:-1], weight.shape[-1]
    return NVFP4(pack(code).view(*lead, k // 2), scale.view(*lead, k // BLOCK), global_scale_1)


def dequantize(q: NVFP4, dtype: torch.dtype = torch.float32) -> Tensor:
    """NVFP4 -> weight [N, K], computed in float32 and cast once."""
    values = e2m1.decode_packed(q.packed).view(-1, BLOCK)
    return (values * _step(q.scale.flatten(), q.global_scale)).view(q.shape).to(dtype)


def _nearest_scale(absmax: Tensor, global_scale_1: Tensor) -> Tensor:
    scale = (global_scale_1 * (absmax / e2m1.MAX)).clamp_(max=SCALE_MAX)
    return scale.masked_fill_(scale <= ROUNDS_TO_ZERO, ZERO_SCALE).to(torch.float8_e4m3fn)


def _neighbours(scale: Tensor) -> Iterator[Tensor]:
    code = scale.view(torch.uint8).to(torch.int16)
    for step in SEARCH_STEPS:  # 1 is E4M3's smallest positive code, 0x7E its largest finite one
        yield (code + step).clamp_(1, 0x7E).to(torch.uint8).view(torch.float8_e4m3fn)


def _step(scale: Tensor, global_scale_1: Tensor) -> Tensor:
    """What one unit of E2M1 is worth in each block: [n, 1] float32."""
    return (scale.to(torch.float32) / global_scale_1)[:, None]
