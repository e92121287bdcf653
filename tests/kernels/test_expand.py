import pytest
import torch

from qerl.kernels.expand import copies, expand
from tests.kernels.devices import DEVICE, normal, seeded

# Of ten rows: one many times, some once, some never.
ROWS = torch.tensor([3, 0, 3, 3, 9, 1, 3, 1, 3, 3, 5, 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (7,), (2, 32)])
def test_copies_and_the_sum_of_their_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = normal(10, *shape, seed=1, dtype=dtype)
    weight = normal(12, *shape, seed=2, dtype=dtype)
    rows = ROWS.to(DEVICE)
    low, wide = (x.clone().to(t).requires_grad_() for t in (dtype, torch.float32))
    out = expand(low, copies(ROWS, 10, DEVICE))
    assert torch.equal(out, x[rows])
    (gradient,) = torch.autograd.grad(out, low, weight)
    (exact,) = torch.autograd.grad(wide[rows], wide, weight.float())
    # The sum is float32, rounded once.
    assert gradient.dtype == dtype
    assert torch.allclose(gradient.float(), exact, rtol=torch.finfo(dtype).eps / 2, atol=2e-6)


def test_the_sum_is_the_same_bit_for_bit_and_a_view_may_be_copied() -> None:
    rows = torch.randint(0, 50, (4000,), generator=seeded())
    made = copies(rows, 50, DEVICE)
    whole = normal(50, 6, 16).requires_grad_()
    weight = normal(4000, 2, 16, seed=3)
    out = expand(whole[:, 2:4], made)  # as the values of a fused projection lie
    first, again = (torch.autograd.grad(out, whole, weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)
    expected = torch.zeros(50, 2, 16, device=DEVICE).index_add_(0, rows.to(DEVICE), weight)
    assert torch.allclose(first[:, 2:4], expected, rtol=1e-4, atol=1e-4)
    assert not first[:, :2].any()


def test_nothing_is_copied_of_nothing() -> None:
    x = normal(3, 4).requires_grad_()
    out = expand(x, copies(torch.zeros(0, dtype=torch.int64), 3, DEVICE))
    assert out.shape == (0, 4)
    assert not torch.autograd.grad(out.sum(), x)[0].any()
