"""Where kernels are tested: on the GPU if there is one, else in Triton's interpreter, whose 16-bit arithmetic is wrong.

Low precision is judged by low precision: a kernel may err at most twice as much, against float32, as PyTorch does.
"""

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed)).to(DEVICE, dtype)


def judge(ours: Tensor, plain: Tensor, exact: Tensor) -> None:
    """ours and plain of one dtype against float32."""
    assert ours.dtype == plain.dtype
    assert ours.shape == exact.shape
    assert ours.isfinite().all()
    if ours.dtype == torch.float32:
        assert torch.allclose(ours, exact, atol=2e-5, rtol=2e-5)
        return
    for error in (torch.max, torch.mean):
        assert error((ours.float() - exact).abs()) <= 2 * error((plain.float() - exact).abs()) + 1e-6
