"""Float32 logits to log-probability, entropy and the gradient's factor: two looks at each row, nothing in between."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.gpu.launch import early, wait

BLOCK = 4096
LEAST = tl.constexpr(-1e30)  # stands for minus infinity where infinities would be subtracted


@triton.jit
def _softmax(
    logits, targets, logp, entropy, lses, out, width, stride, out_stride, temperature,
    GRAD: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program for each row. `out` may lie in the row that it is made from: what is overwritten has been read."""
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * stride
    at = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), LEAST, dtype=tl.float32)  # largest so far, of each lane of its own
    total = tl.zeros((BLOCK,), dtype=tl.float32)  # sum of exp(z - top)
    first = tl.zeros((BLOCK,), dtype=tl.float32)  # sum of exp(z - top) (z - top)
    for start in range(0, width, BLOCK):
        z = tl.load(source + start + at, mask=start + at < width, other=LEAST) / temperature
        z = tl.where(z < LEAST, LEAST, z)
        new = tl.maximum(top, z)
        keep, e = tl.exp(top - new), tl.exp(z - new)
        first = (first + total * (top - new)) * keep + e * (z - new)
        total = total * keep + e
        top = new
    highest = tl.max(top, 0)
    factor = tl.exp(top - highest)
    total_1 = tl.sum(total * factor, 0)
    first_1 = tl.sum((first + total * (top - highest)) * factor, 0)
    lse = highest + tl.log(total_1)
    target = tl.load(targets + row)
    tl.store(logp + row, tl.load(source + target) / temperature - lse)
    tl.store(entropy + row, tl.log(total_1) - first_1 / total_1)
    tl.store(lses + row, lse)
    if GRAD:
        sink = out + row * out_stride
        for start in range(0, width, BLOCK):
            z = tl.load(source + start + at, mask=start + at < width, other=LEAST) / temperature
            value = tl.where(start + at == target, 1.0, 0.0) - tl.exp(z - lse)
            tl.debug_barrier()  # the first block is written onto itself
            tl.store(sink + start + at, value.to(out.dtype.element_ty), mask=start + at < width)


def softmax(
    logits_CV: Tensor,
    targets_C: Tensor,
    temperature: float,
    into: tuple[Tensor, Tensor, Tensor],
    dtype: torch.dtype | None,
) -> Tensor:
    """As `softmax_reference`; what it returns takes the logits' place."""
    rows, width = logits_CV.shape
    assert logits_CV.is_contiguous(), "logits must be contiguous"
    out = logits_CV if dtype is None else logits_CV.view(dtype)[:, :width]
    _softmax[(rows,)](
        logits_CV, targets_C.contiguous(), *into, out, width, width, out.stride(0), temperature,
        GRAD=dtype is not None, BLOCK=BLOCK, num_warps=8, **early(logits_CV),
    )  # fmt: skip
    return out
