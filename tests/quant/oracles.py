"""The libraries that judge the formats, asked in one way each."""

from dataclasses import dataclass

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor


@dataclass(frozen=True)
class Judged:
    packed: Tensor
    scale: Tensor
    global_scale: Tensor | None
    dequantized: Tensor  # bf16, as compressed-tensors always gives


def compressed_tensors(weight: Tensor, format: str, amax: Tensor | None = None) -> Judged:
    """format: nvfp4 or mxfp4; amax: of the tensors that share the global scale."""
    block = {"nvfp4": 16, "mxfp4": 32}[format]
    scheme = preset_name_to_scheme(f"{format.upper()}A16", ["Linear"])
    blocks = weight.view(weight.shape[0], -1, block)
    state = {"weight": weight.clone()}
    global_scale = None
    if format == "nvfp4":
        largest = weight.abs().max() if amax is None else amax
        global_scale = generate_gparam(-largest, largest)
        state["weight_global_scale"] = global_scale
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=global_scale)
    state["weight_scale"] = scale
    compressor = BaseCompressor.get_value_from_registry(f"{format}-pack-quantized")
    compressed = compressor.compress(state, scheme)
    return Judged(
        compressed["weight_packed"],
        compressed["weight_scale"],
        global_scale,
        compressor.decompress(dict(compressed), scheme)["weight"],
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
