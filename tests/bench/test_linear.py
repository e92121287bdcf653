import pytest
import torch

from qerl.bench.linear import layers, measure
from qerl.bench.replay import floor
from qerl.model.shapes import shape_named


def test_the_layers_are_those_of_the_model() -> None:
    assert layers(shape_named("qwen2.5-7b")) == {
        "qkv": ((3584, 512, 512), 3584),
        "o": ((3584,), 3584),
        "gate_up": ((18944, 18944), 3584),
        "down": ((3584,), 18944),
    }


def test_the_floor_is_the_slower_of_bytes_and_arithmetic() -> None:
    assert floor(4.0e6, 0) == pytest.approx(1.0)
    assert floor(4.0e6, 780e7) == pytest.approx(10.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_they_say_so() -> None:
    with pytest.raises(ValueError, match="with a GPU"):
        next(measure("qwen2.5-7b", [1], 32, print))
    with pytest.raises(ValueError, match="knows nvfp4 and nf4, not 'fp8'"):
        next(measure("qwen2.5-7b", [1], 32, print, "fp8"))


@pytest.mark.gpu
def test_they_measure() -> None:
    for form in ("nvfp4", "nf4"):
        rows = list(measure("qwen2.5-0.5b", [8], 16, print, form))
        assert [row["layer"] for row in rows] == ["qkv", "o", "gate_up", "down"]
        assert all(row["us"] > 0 for row in rows)
