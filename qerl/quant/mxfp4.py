"""MXFP4 (OCP Microscaling): E2M1 codes, one power-of-two scale (E8M0) for 32 consecutive inputs. 4.25 bits a weight.

    exponent = floor(log2 amax_block) - 2, one more if amax_block's mantissa is 1.75 or above   (stored plus 127, uint8)
    W_hat    = value(code) * 2**exponent

The rule of the exponent is compressed-tensors' (layout `mxfp4-pack-quantized`); a zero block has the byte 0.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl.quant import e2m1
from qerl.quant.blocks import block_absmax, search_scales, to_blocks
from qerl.quant.e2m1 import pack, unpack

__all__ = ["BLOCK", "MXFP4", "dequantize", "pack", "quantize", "unpack"]

BLOCK = 32
BIAS = 127
MAX_BYTE = 252  # beyond it 6 * 2**exponent would leave float32; only amax_block over 2.97e38 asks for more


@dataclass(frozen=True)
class MXFP4:
    """A weight of shape [N, K] in MXFP4."""

    packed: Tensor  # uint8 [N, K/2], the even input in the low nibble
    scale: Tensor  # uint8 [N, K/32]: biased exponents

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.packed.shape[:-1], self.packed.shape[-1] * 2)


def quantize(weight: Tensor, method: str = "rtn", name: str = "weight") -> MXFP4:
    """weight [N, K], K a multiple of 32 -> MXFP4. method and name as in `nvfp4.quantize`."""
    blocks = to_blocks(weight, BLOCK, name)
    absmax = block_absmax(blocks, name)
    scale = _nearest_scale(absmax)
    if method == "mse":
        scale = search_scales(blocks.abs(), absmax, scale, _neighbours(scale), _step, e2m1.round_magnitudes)
    elif method != "rtn":
        raise ValueError(f"Unknown rounding method {method!r}; MXFP4 knows rtn and mse.")
    code = e2m1.encode(blocks / _step(scale))
    lead, k = weight.shape[:-1], weight.shape[-1]
    return MXFP4(pack(code).view(*lead, k // 2), scale.view(*lead, k // BLOCK))


def dequantize(q: MXFP4, dtype: torch.dtype = torch.float32) -> Tensor:
    """MXFP4 -> weight [N, K], computed in float32 and cast once."""
    values = e2m1.decode_packed(q.packed).view(-1, BLOCK)
    return (values * _step(q.scale.flatten())).view(q.shape).to(dtype)


def _nearest_scale(absmax: Tensor) -> Tensor:
    # Adding a quarter to the mantissa carries into the exponent exactly where the mantissa is 1.75 or above.
    exponent = (absmax.view(torch.int32) + (1 << 21)) >> 23
    return (exponent - e2m1.MAX_EXPONENT).clamp_(0, MAX_BYTE).to(torch.uint8)


def _neighbours(scale: Tensor) -> Iterator[Tensor]:
    for step in (-1, 1):
        yield (scale.to(torch.int16) + step).clamp_(0, MAX_BYTE).to(torch.uint8)


def _step(scale: Tensor) -> Tensor:
    """Biased exponents [n] -> 2**(scale - 127), [n, 1] float32, exact (the byte 0 is the subnormal 2**-127)."""
    bits = torch.where(scale == 0, 1 << 22, scale.to(torch.int32) << 23)
    return bits.to(torch.int32).view(torch.float32)[:, None]
