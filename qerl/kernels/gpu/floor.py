"""What top-k, top-p and min-p leave of a row: all at or above one level, its floor. A program a row.

The floor is the largest float32 with enough at or above it, k tokens or a share top_p of the probability. It is
searched for among the floats in their order, three at a time, so that a search takes at most 16 passes over the row,
most of them over the few chunks that reach so high. Nothing is sorted.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.gpu.launch import early, wait


@triton.jit
def _place(value):
    """A float's place in the order of all floats."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _float(place):
    bits = place.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _at_or_above(
    logits, peaks, low, middle, high, peak, vocab, chunks, inverse, CHUNK: tl.constexpr, COUNT: tl.constexpr
):
    """How many are at or above each of three levels; or their probabilities over the peak's."""
    lows = tl.zeros((CHUNK,), tl.float32)
    middles = tl.zeros((CHUNK,), tl.float32)
    highs = tl.zeros((CHUNK,), tl.float32)
    for chunk in range(chunks):
        if tl.load(peaks + chunk) >= low:
            at = chunk * CHUNK + tl.arange(0, CHUNK)
            z = tl.load(logits + at, mask=at < vocab, other=float("nan")) * inverse
            share = tl.full((CHUNK,), 1.0, tl.float32) if COUNT else tl.exp(z - peak)
            lows += tl.where(z >= low, share, 0.0)
            middles += tl.where(z >= middle, share, 0.0)
            highs += tl.where(z >= high, share, 0.0)
    return tl.sum(lows.to(tl.float64), 0), tl.sum(middles.to(tl.float64), 0), tl.sum(highs.to(tl.float64), 0)


@triton.jit
def _search(logits, peaks, least, peak, enough, vocab, chunks, inverse, CHUNK: tl.constexpr, COUNT: tl.constexpr):
    """The largest float with enough at or above it, from `least` on, which has enough; `least` where enough is NaN."""
    within, beyond = _place(least), _place(peak) + 1
    while beyond - within > 1:
        quarter = (beyond - within + 3) // 4
        first = within + quarter
        second = tl.minimum(first + quarter, beyond)
        third = tl.minimum(second + quarter, beyond)
        low, middle, high = _at_or_above(
            logits, peaks, _float(first), _float(second), _float(third), peak, vocab, chunks, inverse, CHUNK, COUNT
        )
        # Masses fall from the first level to the third. A comparison with NaN says no, so that the search ends.
        one = low >= enough
        two = (middle >= enough) & (second < beyond)
        three = (high >= enough) & (third < beyond)
        beyond = tl.where(three, beyond, tl.where(two, third, tl.where(one, second, first)))
        within = tl.where(three, third, tl.where(two, second, tl.where(one, first, within)))
    return _float(within)


@triton.jit
def _floors(
    logits, peaks, sums, floors, stride, vocab, chunks, inverse, top_k, top_p, reach, step,
    CHUNK: tl.constexpr, MOST: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    peaks += row * chunks
    which = tl.arange(0, MOST)
    peak_of = tl.load(peaks + which, mask=which < chunks, other=float("-inf"))
    peak = tl.max(peak_of, 0)
    floor = peak - float("inf")
    if TOP_K:
        floor = _search(logits, peaks, floor, peak, top_k, vocab, chunks, inverse, CHUNK, True)
    if TOP_P:
        if TOP_K:
            total, _, _ = _at_or_above(logits, peaks, floor, floor, floor, peak, vocab, chunks, inverse, CHUNK, False)
        else:
            sum_of = tl.load(sums + row * chunks + which, mask=which < chunks, other=0.0)
            total = tl.sum(sum_of * tl.exp(peak_of - peak).to(tl.float64), 0)
        # All below the reach together are less than what may be left out.
        least = tl.maximum(floor, peak - reach)
        floor = _search(logits, peaks, least, peak, top_p * total, vocab, chunks, inverse, CHUNK, False)
    tl.store(floors + row, tl.maximum(floor, peak - step))


def floors(
    logits_SV: Tensor,
    peaks: Tensor,
    sums: Tensor,
    chunk: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> Tensor:
    """The smallest logit over temperature of each row that is left, float32 [S].

    peaks, sums [S, chunks]: the largest of each chunk of a row, and the sum of its exponentials over that of the peak.
    """
    rows, vocab = logits_SV.shape
    chunks = triton.cdiv(vocab, chunk)
    result = torch.empty(rows, dtype=torch.float32, device=logits_SV.device)
    reach = 1.0 + math.log(vocab / (1.0 - top_p)) if top_p < 1.0 else math.inf
    step = -math.log(min_p) if min_p > 0.0 else math.inf
    _floors[(rows,)](
        logits_SV, peaks, sums, result, logits_SV.stride(0), vocab, chunks,
        1.0 / temperature, top_k, top_p, reach, step,
        CHUNK=chunk, MOST=triton.next_power_of_2(chunks), TOP_K=0 < top_k < vocab, TOP_P=top_p < 1.0,
        num_warps=8, **early(logits_SV),
    )  # fmt: skip
    return result
