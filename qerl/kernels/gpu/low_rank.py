"""Triton kernels of LoRA: x A^T over pieces of K, and what B adds to a product that is there."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.gpu.launch import early, processors, product, wait, zeros
from qerl.kernels.low_rank import LowRank


@triton.jit(do_not_specialize=["M"])
def down_kernel(
    x, a, out, parts, counts, scale, M, R, K, x_stride,
    PIECES: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, ASM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [M, R] bf16 = scale x A^T. x [M, K] bf16, rows x_stride apart; a [R, K] bf16.

    Programs (r tile, m tile, piece of K); the last piece to arrive adds up the float32 parts, in their order.
    """
    wait(EARLY)
    r_tile, m_tile, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows_r, rows_m, in_k = r_tile * BR + tl.arange(0, BR), m_tile * BM + tl.arange(0, BM), tl.arange(0, BK)
    kept_m = tl.minimum(rows_m, M - 1)
    chunk = tl.cdiv(tl.cdiv(K, BK), PIECES)
    acc = tl.zeros((BR, BM), dtype=tl.float32)
    for step in range(piece * chunk, tl.minimum((piece + 1) * chunk, tl.cdiv(K, BK))):
        k = step * BK + in_k
        left = tl.load(a + rows_r[:, None] * K + k[None, :], mask=(rows_r < R)[:, None] & (k < K)[None, :], other=0.0)
        right = tl.load(x + kept_m[None, :].to(tl.int64) * x_stride + k[:, None], mask=(k < K)[:, None], other=0.0)
        acc = product(left, right, acc, ASM)
    at = tl.arange(0, BR)[:, None] + tl.arange(0, BM)[None, :] * BR
    tile = r_tile * tl.num_programs(1) + m_tile
    ready = PIECES == 1
    if PIECES > 1:
        base = parts + tile.to(tl.int64) * PIECES * (BR * BM)
        tl.store(base + piece * (BR * BM) + at, acc)
        tl.debug_barrier()
        ready = tl.atomic_add(counts + tile, 1, sem="acq_rel") == PIECES - 1
        if ready:
            acc = tl.zeros((BR, BM), dtype=tl.float32)
            for other in tl.static_range(PIECES):  # all loads under way at once
                acc += tl.load(base + other * (BR * BM) + at, cache_modifier=".cg")
            tl.store(counts + tile, 0)
    if ready:
        to = out + rows_m[None, :] * R + rows_r[:, None]
        tl.store(to, (acc * scale).to(out.dtype.element_ty), mask=(rows_m < M)[None, :] & (rows_r < R)[:, None])


@triton.jit(do_not_specialize=["M"])
def up_kernel(
    y, inner, b, column, M, N,
    BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, ASM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y [M, N] bf16 += inner B^T, in place. inner [M, *] bf16: 64 rows of B read R of its columns, from column[] on."""
    wait(EARLY)
    rows_n, rows_m = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1) * BM + tl.arange(0, BM)
    in_r = tl.arange(0, R)
    begin, width = tl.load(column + tl.program_id(0) * BN // 64), tl.load(column + tl.cdiv(N, 64))
    kept_m = tl.minimum(rows_m, M - 1)
    left = tl.load(inner + kept_m[:, None] * width + begin + in_r[None, :])
    right = tl.load(b + rows_n[None, :] * R + in_r[:, None], mask=(rows_n < N)[None, :], other=0.0)
    at = y + rows_m[:, None].to(tl.int64) * N + rows_n[None, :]
    mask = (rows_m < M)[:, None] & (rows_n < N)[None, :]
    acc = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    acc = product(left, right, acc, ASM)
    tl.store(at, acc.to(y.dtype.element_ty), mask=mask)


def inner(x: Tensor, low: LowRank) -> Tensor:
    """scale x A^T, bf16 [M, parts * rank]."""
    rows, (r, inputs) = len(x), low.a.shape
    out = x.new_empty(rows, r)
    bm, br, bk = 16 if rows <= 16 else 32, 16, 128
    tiles = -(-r // br) * -(-rows // bm)
    wanted = min(32, inputs // 448, 2 * processors(x) // tiles)
    pieces = 1 << (max(1, wanted).bit_length() - 1)
    parts = x.new_empty(tiles * pieces * br * bm, dtype=torch.float32)
    down_kernel[(-(-r // br), -(-rows // bm), pieces)](
        x, low.a, out, parts, zeros(x.device), low.scale, rows, r, inputs, x.stride(0), PIECES=pieces,
        BM=bm, BR=br, BK=bk, ASM=x.is_cuda, num_warps=4, **early(x),
    )  # fmt: skip
    return out


def add_low_rank(y: Tensor, x: Tensor, low: LowRank) -> None:
    """y [M, N] bf16 += scale (x A^T) B^T, in place."""
    rows, outputs = y.shape
    bm = min(64, max(16, 1 << (rows - 1).bit_length()))
    up_kernel[(-(-outputs // 64), -(-rows // bm))](
        y,
        inner(x, low),
        low.b,
        low.column,
        rows,
        outputs,
        BM=bm,
        BN=64,
        R=low.rank,
        ASM=x.is_cuda,
        num_warps=4,
        **early(x),
    )
