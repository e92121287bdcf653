"""A program takes one sequence's share of one key/value head's context, for all query heads that share the head.

The grid is (sequences, key/value heads, splits). Shares are equal, in whole tiles; a program whose share is empty ends
at once. Where a sequence has more than one share, each leaves its peak, sum and weighted values in float32, and the
last to finish, told by a counter, adds them up in the order of the shares: the result is the same every time.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.gpu.launch import early, processors, wait

TILE = 64  # tokens at a time
MOST_SPLITS = 32
PROGRAMS = 2  # wanted on each processor


@triton.jit
def _left(partial, stats, base, i, shares, top, at_part, in_q, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The weighted values that share i has left, as they count beside the highest peak; 0 where there is no share i."""
    row = tl.arange(0, ROWS)
    there = row * 0 + i < shares
    height = tl.load(stats + (base + i) * 2 * ROWS + row, mask=there, other=float("-inf"), cache_modifier=".cg")
    at = partial + (base + i) * ROWS * WIDTH + at_part
    return tl.exp2(height - top)[:, None] * tl.load(at, mask=in_q & there[:, None], other=0.0, cache_modifier=".cg")


@triton.jit(do_not_specialize=["table_stride", "position_stride", "window"])
def _attend(
    q, keys, values, key_scales, value_scales, table, position, out, partial, stats, counters,
    scale, window, table_stride, position_stride,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOWED: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, MOST: tl.constexpr, SPLIT: tl.constexpr,
    WIDE: tl.constexpr, FP8: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    sequence, head, split, splits = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    end = tl.load(position + sequence.to(tl.int64) * position_stride).to(tl.int32) + 1
    begin = 0
    if WINDOWED:
        begin = tl.maximum(end - window, 0)
    share = tl.cdiv(tl.cdiv(end - begin, splits), TILE) * TILE
    shares = tl.cdiv(end - begin, share)
    if split >= shares:
        return
    first = begin + split * share
    last = tl.minimum(first + share, end)

    row, dim, token = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, TILE)
    at_q = ((sequence * G + head) * GROUP + row).to(tl.int64)[:, None] * D + dim[None, :]
    in_q = (row < GROUP)[:, None] & (dim < D)[None, :]
    query = tl.load(q + at_q, mask=in_q, other=0.0)
    if WIDE:
        query = query.to(tl.float32)
    blocks = table + sequence.to(tl.int64) * table_stride
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(first, last, TILE):
        at = start + token
        seen = at < last
        place = tl.load(blocks + at // BLOCK_SIZE, mask=seen, other=0).to(tl.int64) * BLOCK_SIZE + at % BLOCK_SIZE
        offset = (place * G + head)[:, None] * D + dim[None, :]
        inside = seen[:, None] & (dim < D)[None, :]
        k = tl.load(keys + offset, mask=inside, other=0.0)
        if WIDE:
            k = k.to(tl.float32)
        elif FP8:
            k = k.to(query.dtype)
        score = tl.dot(query, tl.trans(k), input_precision="ieee") * scale  # in units of log2
        if FP8:
            score *= tl.load(key_scales + place * G + head, mask=seen, other=0.0)[None, :]
        score = tl.where(seen[None, :], score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        p = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(peak - higher)
        mass = mass * shrink + tl.sum(p, 1)
        v = tl.load(values + offset, mask=inside, other=0.0)
        if WIDE:
            v = v.to(tl.float32)
        elif FP8:
            v = v.to(tl.bfloat16)  # which holds every code, and any scale
        if FP8:
            p *= tl.load(value_scales + place * G + head, mask=seen, other=0.0)[None, :]
        weighted = weighted * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        peak = higher

    if not SPLIT or shares == 1:
        tl.store(out + at_q, (weighted / mass[:, None]).to(out.dtype.element_ty), mask=in_q)
    else:
        pair = sequence * G + head
        base = (pair * splits).to(tl.int64)
        at_part = row[:, None] * WIDTH + dim[None, :]
        tl.store(partial + (base + split) * ROWS * WIDTH + at_part, weighted, mask=in_q)
        tl.store(stats + (base + split) * 2 * ROWS + row, peak)
        tl.store(stats + (base + split) * 2 * ROWS + ROWS + row, mass)
        tl.debug_barrier()  # all threads have written before the count says so
        before = tl.atomic_add(counters + pair, 1, sem="acq_rel")
        if before == shares - 1:
            other = tl.arange(0, MOST)[:, None]
            there = stats + (base + other) * 2 * ROWS + row[None, :]
            peaks = tl.load(there, mask=other < shares, other=float("-inf"), cache_modifier=".cg")
            masses = tl.load(there + ROWS, mask=other < shares, other=0.0, cache_modifier=".cg")
            top = tl.max(peaks, 0)
            total = tl.sum(tl.exp2(peaks - top[None, :]) * masses, 0)
            whole = tl.zeros([ROWS, WIDTH], tl.float32)
            for i in range(0, shares, 4):  # four are on their way at once
                a = _left(partial, stats, base, i, shares, top, at_part, in_q, ROWS, WIDTH)
                b = _left(partial, stats, base, i + 1, shares, top, at_part, in_q, ROWS, WIDTH)
                c = _left(partial, stats, base, i + 2, shares, top, at_part, in_q, ROWS, WIDTH)
                d = _left(partial, stats, base, i + 3, shares, top, at_part, in_q, ROWS, WIDTH)
                whole += a + b + c + d
            tl.store(out + at_q, (whole / total[:, None]).to(out.dtype.element_ty), mask=in_q)
            tl.store(counters + pair, 0)


def paged_attention(
    q_SHd: Tensor,
    keys_PGd: Tensor,
    values_PGd: Tensor,
    table_SB: Tensor,
    position_S: Tensor,
    block_size: int,
    window: int | None = None,
    splits: int | None = None,
    counters: Tensor | None = None,
    scales_2PG: Tensor | None = None,
) -> Tensor:
    """Arguments as of the public function; splits: programs for a sequence's context, by default by what is free."""
    (sequences, h, d), g = q_SHd.shape, keys_PGd.shape[1]
    assert q_SHd.is_contiguous(), "q must be contiguous"
    assert keys_PGd.is_contiguous(), "keys must be contiguous"
    assert values_PGd.is_contiguous(), "values must be contiguous"
    assert table_SB.stride(1) == 1, "a row of the table must be contiguous"
    splits = splits or splits_for(sequences * g, table_SB.shape[1] * block_size, processors(q_SHd))
    rows, width = max(16, triton.next_power_of_2(h // g)), max(16, triton.next_power_of_2(d))
    out = torch.empty_like(q_SHd)
    partial = stats = None
    if splits > 1:
        partial = torch.empty(sequences * g * splits, rows, width, dtype=torch.float32, device=q_SHd.device)
        stats = torch.empty(sequences * g * splits, 2, rows, dtype=torch.float32, device=q_SHd.device)
        if counters is None:
            counters = torch.zeros(sequences * g, dtype=torch.int32, device=q_SHd.device)
        assert counters.numel() >= sequences * g, "too few counters"
    key_scales, value_scales = (None, None) if scales_2PG is None else scales_2PG
    narrow = q_SHd.is_cuda and q_SHd.dtype != torch.float32
    # Half of the stages go to the table's entries: with 5, two tiles are under way while one is computed. Where
    # programs have the GPU to themselves, more of each is under way; where they queue, more of them fit.
    few = sequences * g * splits <= PROGRAMS * processors(q_SHd)
    stages = (5 if few and width <= 128 else 3) if narrow else 1
    _attend[(sequences, g, splits)](
        q_SHd, keys_PGd, values_PGd, key_scales, value_scales, table_SB, position_S, out, partial, stats, counters,
        math.log2(math.e) / math.sqrt(d), window or 0, table_SB.stride(0), position_S.stride(0),
        G=g, GROUP=h // g, D=d, BLOCK_SIZE=block_size, WINDOWED=window is not None, SPLIT=splits > 1,
        ROWS=rows, WIDTH=width, TILE=TILE, MOST=MOST_SPLITS, WIDE=not narrow, FP8=scales_2PG is not None,
        num_warps=8 if few and narrow else 4, num_stages=stages, **early(q_SHd),
    )  # fmt: skip
    return out


def splits_for(pairs: int, context: int, processors: int) -> int:
    """Programs for each of so many (sequence, head) pairs: a power of two that fills the GPU, at most a tile each."""
    wanted = min(PROGRAMS * processors // pairs, -(-context // TILE), MOST_SPLITS)
    return 1 << (max(wanted, 1).bit_length() - 1)
