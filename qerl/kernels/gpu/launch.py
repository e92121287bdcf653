"""What all kernels share: how they are launched one after another, and what the GPU has."""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait(EARLY: tl.constexpr):
    """Let the next kernel come, then wait for all that the kernels before have written."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def product(left, right, acc, ASM: tl.constexpr):
    """acc + left right; without a GPU (ASM False) in float32: the interpreter can't multiply 16-bit matrices."""
    if ASM:
        return tl.dot(left, right, acc)
    else:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), acc)


@lru_cache
def _hopper(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


@lru_cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def processors(x: Tensor) -> int:
    """Streaming multiprocessors of the tensor's GPU; 1 in the interpreter."""
    return _processors(x.device.index) if x.is_cuda else 1


def early(x: Tensor) -> dict[str, Any]:
    """Arguments of a launch that may start before the kernel before it has ended, where the GPU can do that."""
    if x.is_cuda and _hopper(x.device.index):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


@lru_cache
def zeros(device: torch.device) -> Tensor:
    """Counters of arrivals, int32: 0 before and after every launch; launches of a stream follow each other."""
    return torch.zeros(1 << 16, dtype=torch.int32, device=device)
