import pytest
import torch

from qerl.kernels.gpu.swiglu import swiglu as fused
from qerl.kernels.swiglu import swiglu_reference
from tests.kernels.devices import DTYPES, judge, normal


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 6), (3, 2 * 1500), (5, 2 * 1024)])
def test_the_kernel_equals_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = normal(*shape, dtype=dtype) * 4
    judge(fused(x), swiglu_reference(x), swiglu_reference(x.float()))
