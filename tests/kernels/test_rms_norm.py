import pytest
import torch
import transformers

from qerl.kernels.gpu.rms_norm import add_rms_norm as fused
from qerl.kernels.gpu.rms_norm import rms_norm_backward
from qerl.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_backward_reference, rms_norm_reference
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backward", [rms_norm_backward, rms_norm_backward_reference])
def test_the_backward_pass_equals_autograd(shape: tuple[int, int], dtype: torch.dtype, backward: object) -> None:
    total, dtotal, dy = (normal(*shape, seed=seed, dtype=dtype) for seed in range(3))
    weight, noise = normal(shape[1], seed=3), normal(shape[1], seed=4)

    def outcome(to: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        leaves = total.to(to).requires_grad_(), weight.clone().requires_grad_()
        normed = rms_norm_reference(leaves[0], leaves[1], 1e-5, noise)
        outs = [leaves[0] * 1.0, normed]
        return torch.autograd.grad(outs, leaves, [dtotal.to(to), dy.to(to)])

    plain, exact = outcome(dtype), outcome(torch.float32)
    for ours, low, wide in zip(backward(total, weight, 1e-5, noise, dtotal, dy, True), plain, exact, strict=True):
        judge(ours, low, wide)
    alone, none = backward(total, weight, 1e-5, None, None, dy, False)
    assert none is None
    assert alone.shape == total.shape


@pytest.mark.parametrize("adds", [False, True])
def test_gradients_are_those_of_autograd(adds: bool) -> None:
    leaves = [normal(*shape, seed=seed).requires_grad_() for seed, shape in enumerate([(4, 10), (4, 10), (10,)])]
    x, delta, weight = leaves
    results = []
    for ours in (True, False):
        added = x + delta if adds else x
        normed = rms_norm_reference(added, weight, 1e-6)
        if ours:
            added, normed = add_rms_norm(x, delta if adds else None, weight, 1e-6)
        asked = leaves if adds else [x, weight]
        results.append(torch.autograd.grad((3 * added).sum() + normed.pow(3).sum(), asked))
    for ours, exact in zip(*results, strict=True):
        assert torch.allclose(ours, exact, atol=1e-5, rtol=1e-5)
    (alone,) = torch.autograd.grad(rms_norm(x, weight.detach(), 1e-6).pow(3).sum(), x)
    (exact,) = torch.autograd.grad(rms_norm_reference(x, weight, 1e-6).pow(3).sum(), x)
    assert torch.allclose(alone, exact, atol=1e-5)
    (unused,) = torch.autograd.grad(add_rms_norm(x, delta if adds else None, weight, 1e-6)[0].sum(), x)
    assert torch.equal(unused, torch.ones_like(x))
