"""What kernels can't serve is said, with the reason. The layers are on the CPU: only what is said is tested here."""

import logging

import pytest
import torch
from torch import Tensor, nn

from qerl.model.layers import DenseWeight, Lora, Projection, QuantizedWeight
from qerl.model.slow_layers import warn_of_slow_lora, warn_of_slow_weights
from qerl.quant import mxfp4, nf4, nvfp4


def layer(*parts: object, sizes: tuple[int, ...] = (64, 64)) -> Projection:
    weight = QuantizedWeight(list(parts), torch.bfloat16, keep_copy=False)
    return Projection(("gate_proj", "up_proj"), sizes, weight, None)


def matrix(rows: int = 64, inputs: int = 64) -> Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("parts", "dtype", "reason"),
    [
        ((nvfp4.quantize(matrix()), matrix()), torch.bfloat16, "a part is in 16 bits"),
        ((nvfp4.quantize(matrix()), mxfp4.quantize(matrix())), torch.bfloat16, "different formats"),
        ((nf4.quantize(matrix(inputs=96)),) * 2, torch.bfloat16, "straddle rows"),
        ((nvfp4.quantize(matrix()),) * 2, torch.float32, "the kernels compute in bfloat16, not in float32"),
    ],
)
def test_a_slow_weight_is_named_once_with_the_reason(parts, dtype, reason, caplog) -> None:
    model = nn.ModuleDict({"one": layer(*parts), "two": layer(*parts)})
    with caplog.at_level(logging.WARNING):
        warn_of_slow_weights(model, dtype)
    assert len(caplog.messages) == 1
    assert "2 fused layers (the first is one) are dequantized at every call" in caplog.text
    assert reason in caplog.text


def test_lora_on_odd_parts_is_said_and_other_layers_are_not(caplog) -> None:
    dense = DenseWeight(matrix(128))
    odd = Projection(("q_proj", "k_proj"), (96, 32), dense, None)
    even = Projection(("q_proj", "k_proj"), (64, 64), dense, None)
    last = Projection(("o_proj",), (100,), dense, None)
    model = nn.ModuleDict({"odd": odd, "even": even, "last": last})
    warn_of_slow_lora(model)
    warn_of_slow_weights(model, torch.bfloat16)
    assert not caplog.messages  # without LoRA nothing is slow
    for projection in (odd, even, last):
        part = projection.parts[0]
        projection.lora[part] = Lora(matrix(4), matrix(projection.sizes[0], 4), 1.0, torch.float32)
    warn_of_slow_lora(model)
    assert len(caplog.messages) == 1
    assert "LoRA of 1 fused layers (the first is odd)" in caplog.text
    assert "no multiples of 64" in caplog.text
