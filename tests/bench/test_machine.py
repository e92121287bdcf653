import pytest
import torch

from qerl.bench.machine import available_bytes, default_shape, require_context, require_shapes
from tests.conftest import Command

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_the_default_shape_is_large_on_a_gpu_and_tiny_on_a_cpu() -> None:
    assert default_shape(GPU) == "qwen2.5-7b"
    assert default_shape(CPU) == "toy"


def test_a_sequence_may_be_as_long_as_the_context() -> None:
    require_context(["toy", "qwen2.5-7b"], 32000, 768)
    with pytest.raises(ValueError, match=r"32000 tokens and 769 new ones are 32769; the context of toy is 32768: ask"):
        require_context(["toy"], 32000, 769)


def test_a_shape_whose_weights_plainly_do_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    assert (available_bytes() or 1) > 0
    monkeypatch.setattr("qerl.bench.machine.available_bytes", lambda: 24 * 10**9)
    require_shapes(["toy", "qwen2.5-3b"], CPU)
    require_shapes(["qwen2.5-32b"], GPU)
    with pytest.raises(ValueError, match=r"qwen2\.5-7b takes 30\.5 GB on a CPU \(float32\), and 24\.0 GB of memory"):
        require_shapes(["toy", "qwen2.5-7b"], CPU)
    with pytest.raises(ValueError, match="no shape 'qwen'"):
        require_shapes(["qwen"], GPU)
    for words in ("prefill", "startup", "logprobs", "rollout", "rollout --batch 1", "step", "step --tokens 64"):
        done = command("bench", *words.split(), "--shape", "qwen2.5-7b", "--device", "cpu")
        assert done.returncode == 2
        assert done.stderr.startswith("error: qwen2.5-7b takes 30.5 GB")
    monkeypatch.setattr("qerl.bench.machine.available_bytes", lambda: None)  # a system that does not say
    require_shapes(["qwen2.5-32b"], CPU)
