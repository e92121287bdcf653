import pytest
import torch

from qerl.kernels.gpu.swiglu import swiglu as fused
from qerl.kernels.gpu.swiglu import swiglu_backward as fused_backward
from qerl.kernels.swiglu import swiglu, swiglu_backward, swiglu_reference
from tests.kernels.devices import DTYPES, judge, normal


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 6), (3, 2 * 1500), (5, 2 * 1024)])
def test_the_kernel_equals_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = normal(*shape, dtype=dtype) * 4
    judge(fused(x), swiglu_reference(x), swiglu_reference(x.float()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backward", [fused_backward, swiglu_backward])
def test_the_backward_pass_equals_autograd_and_gives_the_product_again(backward: object, dtype: torch.dtype) -> None:
    x, dh = normal(3, 2 * 1500, dtype=dtype) * 4, normal(3, 1500, seed=1, dtype=dtype)

    def outcome(to: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.to(to, copy=True).requires_grad_()
        h = swiglu_reference(leaf)
        return h.detach(), torch.autograd.grad(h, leaf, dh.to(to))[0]

    (plain_h, plain), (exact_h, exact) = outcome(dtype), outcome(torch.float32)
    ours, h = x.clone(), dh.clone()
    backward(ours, h)
    judge(h, plain_h, exact_h)
    judge(ours, plain, exact)


def test_gradients_come_once_and_a_second_pass_is_refused() -> None:
    x = normal(4, 12).requires_grad_()
    y = x * 1.0
    out = swiglu(y)
    (grad,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    (exact,) = torch.autograd.grad(swiglu_reference(x).sum(), x)
    assert torch.allclose(grad, exact, atol=1e-6)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), x)
