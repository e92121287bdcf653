"""Rotary position embedding, with the scalings of the supported families.

The two halves of a head are the two coordinates of each rotation (transformers' convention). Frequencies and angles are
float32. Scalings: default; linear (position interpolation); llama3 (long wavelengths stretched, short ones kept, a ramp
between); yarn (the ramp over dimensions, and a factor on cos and sin).
"""

import math
from typing import Any

import torch
from torch import Tensor

from qerl.kernels.choice import fused

SCALINGS = ("default", "linear", "llama3", "yarn")


def rope_frequencies(head_dim: int, parameters: dict[str, Any], max_positions: int) -> tuple[Tensor, float]:
    """`rope_parameters` of a transformers config -> frequencies float32 [head_dim / 2], factor on cos and sin."""
    kind = parameters.get("rope_type", "default")
    if kind not in SCALINGS:
        raise ValueError(f"Rope scaling {kind!r} is not supported; supported are {', '.join(SCALINGS)}.")
    base = parameters["rope_theta"]
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (base**exponents)
    if kind == "linear":
        return frequencies / parameters["factor"], 1.0
    if kind == "llama3":
        return _llama3(frequencies, parameters), 1.0
    if kind == "yarn":
        return _yarn(base**exponents, head_dim, parameters, max_positions)
    return frequencies, 1.0


def _llama3(frequencies: Tensor, p: dict[str, Any]) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    turns = p["original_max_position_embeddings"] / wavelengths  # rotations within the original context
    ramp = ((turns - p["low_freq_factor"]) / (p["high_freq_factor"] - p["low_freq_factor"])).clamp(0, 1)
    scaled: Tensor = (1 - ramp) * frequencies / p["factor"] + ramp * frequencies
    return scaled


def _yarn(wavelengths: Tensor, dim: int, p: dict[str, Any], max_positions: int) -> tuple[Tensor, float]:
    original = p.get("original_max_position_embeddings") or max_positions
    factor = p.get("factor") or max_positions / original

    def dimension(turns: float) -> float:
        """Where along the head the rotation makes so many turns within the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(p["rope_theta"]))

    low, high = dimension(p.get("beta_fast") or 32), dimension(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    frequencies = (1.0 / (factor * wavelengths)) * ramp + (1.0 / wavelengths) * (1 - ramp)

    def magnitude(weight: float = 1.0) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = p.get("attention_factor")
    if attention is None:
        weights = p.get("mscale"), p.get("mscale_all_dim")
        attention = magnitude(weights[0]) / magnitude(weights[1]) if weights[0] and weights[1] else magnitude()
    return frequencies, float(attention)


def rope_tables(positions_T: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """int64 positions -> cos and sin [T, 1, d], computed in float32, in the dtype of the heads they will turn."""
    if fused(positions_T, frequencies):
        from qerl.kernels.gpu import rope as gpu

        return gpu.rope_tables(positions_T, frequencies, factor, dtype)
    return rope_tables_reference(positions_T, frequencies, factor, dtype)


def rope_tables_reference(
    positions_T: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    angles = positions_T.to(torch.float32)[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rope(x_THd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [T, H, d] turned by the tables [T, 1, d]."""
    first, second = x_THd.chunk(2, dim=-1)
    return x_THd * cos + torch.cat((-second, first), dim=-1) * sin
