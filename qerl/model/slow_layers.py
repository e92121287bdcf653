"""Layers that the GPU kernels can't serve, and why: said once, when a model is loaded or LoRA attached."""

import logging
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from qerl.kernels.low_rank import ROWS, kernels_take
from qerl.model.layers import Projection, QuantizedWeight
from qerl.quant.nf4 import NF4

log = logging.getLogger(__name__)


def warn_of_slow_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """4-bit weights that are dequantized at every call."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, projection in _projections(model):
        if reason := slow_weight(projection.weight, dtype):
            found[reason].append(name)
    for reason, names in found.items():
        log.warning(
            "%d fused layers (the first is %s) are dequantized at every call, which is several times slower: %s",
            *(len(names), names[0], reason),
        )


def warn_of_slow_lora(model: nn.Module) -> None:
    """LoRA that is added by PyTorch, part by part, beside a kernel-less product."""
    names = [name for name, projection in _projections(model) if slow_lora(projection)]
    if names:
        log.warning(
            "LoRA of %d fused layers (the first is %s) takes a slow path, and so do the layers: their parts (q, k, v; "
            "gate, up) have outputs that are no multiples of %d, as the GPU kernels want them.",
            *(len(names), names[0], ROWS),
        )


def slow_weight(weight: nn.Module, dtype: torch.dtype) -> str:
    """Why a 4-bit weight on a GPU is not laid out for kernels; empty where it is, or where there is nothing to say."""
    if not isinstance(weight, QuantizedWeight) or weight.tiles is not None or weight.kept is not None:
        return ""
    if dtype != torch.bfloat16:
        return f"the kernels compute in bfloat16, not in {str(dtype).removeprefix('torch.')}."
    if any(isinstance(part, Tensor) for part in weight.parts):
        return (
            "a part is in 16 bits (ignored when the model was quantized). Quantize all parts of a fused layer, or none."
        )
    if len({type(part) for part in weight.parts}) > 1:
        return "its parts are in different formats."
    if isinstance(weight.parts[0], NF4):
        return "NF4 blocks that are shorter than 64 weights, or straddle rows, have no kernel."
    return "the scales of MXFP4 blocks lie further apart than the kernels' layout can hold."


def slow_lora(projection: Projection) -> bool:
    return bool(projection.lora) and not kernels_take(projection.sizes)


def _projections(model: nn.Module) -> Iterator[tuple[str, Projection]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Projection))
