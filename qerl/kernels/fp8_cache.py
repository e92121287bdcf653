"""Keys and values in 8 bits: E4M3 codes, and a float32 scale for each token and head.

    scale = max |x| / 448        code = e4m3(x / scale)        x^ = code scale

A scale of its own for every token and head costs 4 bytes beside the head's codes; no calibration is needed, nothing
overflows (keys of Qwen2.5 reach hundreds), and a kernel multiplies a score or a probability by it, not every element.
"""

import torch
from torch import Tensor

LARGEST = 448.0  # of E4M3
SMALLEST = 1e-30  # what a smaller maximum counts as
SCALE_BYTES = 4


def to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., d] -> codes float8_e4m3fn [..., d], scales float32 [...]."""
    wide = x.to(torch.float32)
    largest = wide.abs().amax(-1).clamp(min=SMALLEST)
    return (wide * (LARGEST / largest)[..., None]).to(torch.float8_e4m3fn), largest / LARGEST


def from_fp8(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """codes [..., d], scales [...] -> [..., d], rounded once."""
    return (codes.to(torch.float32) * scales[..., None]).to(dtype)
