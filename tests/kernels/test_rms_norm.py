import pytest
import torch
import transformers

from qerl.kernels.gpu.rms_norm import add_rms_norm as fused
from qerl.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_reference
from tests.kernels.devices import DEVICE, DTYPES, judge, normal

SHAPES = [(1, 64), (5, 100), (3, 3584)]


def test_the_reference_is_the_norm_of_transformers() -> None:
    norm = transformers.models.qwen2.modeling_qwen2.Qwen2RMSNorm(96, eps=1e-6)
    norm.weight.data = torch.randn(96)
    x = torch.randn(7, 96)
    assert torch.allclose(rms_norm_reference(x, norm.weight.data, 1e-6), norm(x), atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("noisy", [False, True])
def test_the_kernel_equals_the_reference(shape: tuple[int, int], dtype: torch.dtype, noisy: bool) -> None:
    x, delta = normal(*shape, dtype=dtype), normal(*shape, seed=1, dtype=dtype)
    weight, noise = normal(shape[1], seed=2), normal(shape[1], seed=3) if noisy else None
    total, normed = fused(x, delta, weight, 1e-5, noise)
    assert torch.equal(total, x + delta)
    judge(
        normed, rms_norm_reference(total, weight, 1e-5, noise), rms_norm_reference(total.float(), weight, 1e-5, noise)
    )
    same, normed = fused(x, None, weight, 1e-5, noise)
    assert same is x
    judge(normed, rms_norm_reference(x, weight, 1e-5, noise), rms_norm_reference(x.float(), weight, 1e-5, noise))


def test_noise_of_zero_is_no_noise() -> None:
    x, weight, zero = normal(4, 100), normal(100, seed=2), torch.zeros(100, device=DEVICE)
    assert torch.equal(fused(x, None, weight, 1e-6, zero)[1], fused(x, None, weight, 1e-6, None)[1])
    assert torch.equal(rms_norm(x, weight, 1e-6, zero), rms_norm(x, weight, 1e-6))


def test_gradients_reach_all_that_asks_for_them() -> None:
    x, delta, weight = (
        normal(*shape, seed=seed).requires_grad_() for seed, shape in enumerate([(4, 10), (4, 10), (10,)])
    )
    total, normed = add_rms_norm(x, delta, weight, 1e-6)
    (total.sum() + normed.square().sum()).backward()
    assert all(tensor.grad is not None for tensor in (x, delta, weight))
