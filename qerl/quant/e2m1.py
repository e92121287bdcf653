"""E2M1, the 4-bit float of NVFP4 and MXFP4: sign, two exponent bits, one mantissa bit.

Magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6 have the codes 0 to 7; the sign is bit 3. Two codes lie in a byte, the even input
in the low nibble. Rounding is to nearest, ties to the even code. Since the grid is piecewise linear in its code, both
directions are a minimum or maximum of three lines, exact in float32:

    code(y)  = min(round(2y), round(y) + 2, round(y/2) + 4)      value(c) = max(c/2, c - 2, 2c - 8)
"""

from functools import cache

import torch
from torch import Tensor

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MAX = 6.0
MAX_EXPONENT = 2  # 6 = 1.5 * 2**2


def encode(x: Tensor) -> Tensor:
    """float32 x, any shape -> uint8 codes 0..15. |x| over 6 saturates; a negative that rounds to zero keeps its sign
    (code 8), an exact zero of either sign is code 0."""
    y = x.abs()
    code = _magnitude_code(y)
    sign = torch.lt(x, 0.0, out=y)
    return code.add_(sign, alpha=8).to(torch.int8).view(torch.uint8)


def decode(code: Tensor) -> Tensor:
    """uint8 codes 0..15 -> float32 values."""
    return _table(code.device).index_select(0, code.flatten().to(torch.int32)).view(code.shape)


def decode_packed(packed: Tensor) -> Tensor:
    """decode(unpack(packed)) in one look-up a byte: bytes [..., K/2] -> float32 values [..., K]."""
    pairs = decode(unpack(torch.arange(256, dtype=torch.uint8, device=packed.device)))
    table = pairs.view(torch.int64)  # the two floats of a byte as one 8-byte entry
    values = table.index_select(0, packed.flatten().to(torch.int32)).view(torch.float32)
    return values.view(*packed.shape[:-1], packed.shape[-1] * 2)


@cache  # brought to a device once: a captured graph must not copy from the host
def _table(device: torch.device) -> Tensor:
    return torch.tensor(VALUES, dtype=torch.float32, device=device)


def round_magnitudes(y: Tensor, step: Tensor) -> Tensor:
    """float32 magnitudes y rounded to the grid of `step`: decode(encode(y / step)) * step."""
    return _magnitude(_magnitude_code(y / step)).mul_(step)


def pack(code: Tensor) -> Tensor:
    """uint8 codes [..., K] -> bytes [..., K/2], the even input in the low nibble."""
    if code.shape[-1] % 2:
        raise ValueError(f"Packing needs an even number of codes a row; this has {code.shape[-1]}.")
    pair = aligned(code).view(torch.int16)  # little-endian: low byte = even input
    return (pair | (pair >> 4)).to(torch.uint8)


def aligned(code: Tensor) -> Tensor:
    """Contiguous, and begun at an even byte, so that pairs can be seen as 16-bit numbers."""
    code = code.contiguous()
    return code.clone() if code.storage_offset() % 2 else code


def unpack(packed: Tensor) -> Tensor:
    """bytes [..., K/2] -> uint8 codes [..., K]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def _magnitude_code(y: Tensor) -> Tensor:
    """Codes of magnitudes as float32; y is used up (few buffers: they stay in the cache)."""
    code = (y * 2).round_()
    torch.minimum(code, y.round().add_(2), out=code)
    return torch.minimum(code, y.mul_(0.5).round_().add_(4), out=code).clamp_(max=7)


def _magnitude(code: Tensor) -> Tensor:
    """Values of magnitude codes; code is used up."""
    value = code * 0.5
    torch.maximum(value, code - 2, out=value)
    return torch.maximum(value, code.mul_(2).sub_(8), out=value)
