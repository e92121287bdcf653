"""Small kernels around the model, so that a step's bookkeeping is two launches."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.gpu.launch import early, wait

BLOCK = 128


@triton.jit
def _places(position, table, out, rows, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait(EARLY)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    at = tl.load(position + row, mask=mask, other=0)
    block = tl.load(table + row.to(tl.int64) * stride + at // SIZE, mask=mask, other=0)
    tl.store(out + row, block * SIZE + at % SIZE, mask=mask)


@triton.jit
def _advance(
    numbers, at, tokens, logprobs, new, drawn, policy, rows, numbers_stride, tokens_stride, step_stride, kind_stride,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    step = tl.load(at)
    row = tl.arange(0, BLOCK)
    mask = row < rows
    token = tl.load(new + row, mask=mask, other=0)
    tl.store(tokens + step * tokens_stride + row, token, mask=mask)
    tl.store(logprobs + step * step_stride + row, tl.load(drawn + row, mask=mask, other=0.0), mask=mask)
    tl.store(logprobs + kind_stride + step * step_stride + row, tl.load(policy + row, mask=mask, other=0.0), mask=mask)
    tl.store(numbers + row, token, mask=mask)
    position, count = numbers + numbers_stride + row, numbers + 2 * numbers_stride + row
    tl.store(position, tl.load(position, mask=mask, other=0) + 1, mask=mask)
    tl.store(count, tl.load(count, mask=mask, other=0) + 1, mask=mask)
    tl.debug_barrier()  # every thread has read the step
    tl.store(at, step + 1)


def places(position_S: Tensor, table_SB: Tensor, block_size: int) -> Tensor:
    assert position_S.is_contiguous(), "positions must be contiguous"
    assert table_SB.stride(1) == 1, "a row of the table must be contiguous"
    out = torch.empty_like(position_S)
    _places[(triton.cdiv(len(out), BLOCK),)](
        position_S, table_SB, out, len(out), table_SB.stride(0), SIZE=block_size, BLOCK=BLOCK, **early(out)
    )
    return out


def advance(
    numbers_4S: Tensor, at: Tensor, tokens_LS: Tensor, logprobs_2LS: Tensor, drawn: tuple[Tensor, Tensor, Tensor]
) -> None:
    rows = numbers_4S.shape[1]
    _advance[(1,)](
        numbers_4S, at, tokens_LS, logprobs_2LS, *drawn, rows,
        numbers_4S.stride(0), tokens_LS.stride(0), logprobs_2LS.stride(1), logprobs_2LS.stride(0),
        BLOCK=triton.next_power_of_2(rows), num_warps=4, **early(at),
    )  # fmt: skip
