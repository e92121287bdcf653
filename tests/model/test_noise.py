from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qerl.kernels.rms_norm import rms_norm
from qerl.model.adapter import add_lora
from qerl.model.decoder import Decoder
from qerl.model.layers import LoraSettings, RMSNorm
from qerl.model.loader import load
from qerl.model.noise import clear_noise, set_noise
from qerl.model.packing import pack
from tests.model.test_decoder import log_probs, worst


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bf16"])
def model(request: pytest.FixtureRequest, make_checkpoint: Callable[..., Path], tmp_path: Path) -> Decoder:
    folder = str(make_checkpoint("qwen3"))
    return load(folder, base="nvfp4", device="cpu", dtype=request.param, cache_dir=tmp_path / "cache")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("sigma", [1e-4, 1e-2])
def test_noise_changes_the_logits_only_where_asked_and_goes_without_a_trace(model: Decoder, sigma: float) -> None:
    clean = log_probs(model)
    set_noise(model, sigma, generator())
    assert worst(log_probs(model), clean) == 0  # a forward says whether noise applies
    noisy = log_probs(model, noise=True)
    assert worst(noisy, clean) > 0
    clear_noise(model)
    assert worst(log_probs(model, noise=True), clean) == 0
    set_noise(model, sigma, generator())
    assert worst(log_probs(model, noise=True), noisy) == 0


def test_many_draws_do_not_accumulate(model: Decoder) -> None:
    for seed in range(20):
        set_noise(model, 0.05, generator(seed))
    repeated = log_probs(model, noise=True)
    clear_noise(model)
    set_noise(model, 0.05, generator(19))
    assert worst(log_probs(model, noise=True), repeated) == 0


def test_only_the_two_norms_of_each_block_take_noise(model: Decoder) -> None:
    set_noise(model, 0.1, generator())
    for block in model.blocks:
        for norm in (block.input_norm, block.post_attention_norm):
            assert norm.noise_D.dtype == torch.float32
            assert 0.05 < float(norm.noise_D.std()) < 0.15
    noisy = {id(n) for b in model.blocks for n in (b.input_norm, b.post_attention_norm)}
    for module in model.modules():
        if isinstance(module, RMSNorm) and id(module) not in noisy:
            assert module.noise_D is None


def test_sigma_may_differ_by_layer(model: Decoder) -> None:
    set_noise(model, [0.0, 0.2], generator())
    first, second = model.blocks
    assert float(first.input_norm.noise_D.abs().max()) == 0
    assert float(second.input_norm.noise_D.std()) > 0.1
    with pytest.raises(ValueError, match="3 noise levels were given for 2 layers"):
        set_noise(model, [0.1] * 3, generator())
    with pytest.raises(ValueError, match="not negative"):
        set_noise(model, -0.1, generator())


def test_noise_on_a_model_where_no_norm_takes_it_is_an_error(model: Decoder) -> None:
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.noise_D = None
    with pytest.raises(ValueError, match="two norms a layer that take it; this model has 0"):
        set_noise(model, 0.1, generator())
    with pytest.raises(ValueError, match="has 0"):
        clear_noise(model)


def test_noise_is_beside_the_gain_in_float32() -> None:
    # In bf16 1 + 1e-4 is 1; beside the gain in float32 it is not.
    x = torch.randn(64, 256).bfloat16()
    gain, noise = torch.ones(256), torch.full((256,), 1e-3)
    plain, noisy = rms_norm(x, gain, 1e-6), rms_norm(x, gain, 1e-6, noise)
    wide = x.double()
    exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * (1 + noise.double())
    assert not torch.equal(plain, noisy)
    assert (noisy.double() - exact).abs().max() <= (exact.bfloat16().double() - exact).abs().max() * 1.01
    assert torch.equal(rms_norm(x, gain, 1e-6, torch.zeros(256)), plain)


def test_recomputing_with_other_noise_than_the_forward_had_raises(model: Decoder) -> None:
    add_lora(model, LoraSettings(r=2))
    set_noise(model, 0.05, generator())
    hidden = model(pack([[1, 2, 3]]), noise=True, recompute=True)
    set_noise(model, 0.05, generator(1))
    with pytest.raises(ValueError, match="Noise changed between a forward"):
        hidden.sum().backward()
    hidden = model(pack([[1, 2, 3]]), noise=True, recompute=True)
    hidden.sum().backward()
