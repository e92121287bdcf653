"""Two launches: the peak and the sum of each chunk of each row; then a program a row that finds chunk and token.
Filters take two more: each row's floor (`floor`), and the sums of what is left above it.

Sums are float64, so that the token is the reference's but for ties within rounding. NaN in a row's logits comes out as
a NaN log-prob, with some token of the vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.gpu.floor import floors as floors_of
from qerl.kernels.gpu.launch import early, wait

CHUNK = 4096


@triton.jit
def _left(logits, floors, row, stride, at, vocab, inverse, FLOOR: tl.constexpr):
    """Logits over temperature; -inf below the row's floor. NaN stays."""
    z = tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf")) * inverse
    if FLOOR:
        z = tl.where(z < tl.load(floors + row), float("-inf"), z)
    return z


@triton.jit
def _chunk_sums(
    logits, floors, peaks, sums, best, stride, vocab, inverse,
    CHUNK: tl.constexpr, GREEDY: tl.constexpr, FLOOR: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    z = _left(logits, floors, row, stride, at, vocab, inverse, FLOOR)
    peak = tl.max(z, 0)
    to = row * chunks + chunk
    tl.store(peaks + to, peak)
    tl.store(sums + to, tl.sum(tl.exp(z - tl.where(peak == float("-inf"), 0.0, peak)).to(tl.float64), 0))
    if GREEDY:
        largest = tl.min(tl.where(z == peak, at, vocab - 1), 0)  # the first of equals; NaN equals nothing
        tl.store(best + to, largest)


@triton.jit
def _uniform(key, number):
    """The last round of the hash, as `sample.uniforms` has it."""
    state = (key + number).to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    state = state ^ (state >> 31)
    return (state >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _totals(peaks, sums, row, chunks, MOST: tl.constexpr):
    """Of a row: its chunks' peaks and weights, the row's peak, and the weights' running sums and total."""
    which = tl.arange(0, MOST)
    peak_of = tl.load(peaks + row * chunks + which, mask=which < chunks, other=float("-inf"))
    sum_of = tl.load(sums + row * chunks + which, mask=which < chunks, other=0.0)
    peak = tl.max(peak_of, 0)
    weight = sum_of * tl.exp(peak_of - peak).to(tl.float64)
    running = tl.cumsum(weight, 0)
    return peak_of, weight, peak, running, tl.sum(tl.where(which == MOST - 1, running, 0.0), 0)


@triton.jit(do_not_specialize=["key_stride", "drawn_stride"])
def _pick(
    logits, policy, floors, peaks, sums, best, policy_peaks, policy_sums, keys, drawn,
    tokens, logprobs, policy_logprobs,
    stride, policy_stride, key_stride, drawn_stride, vocab, chunks, inverse,
    CHUNK: tl.constexpr, MOST: tl.constexpr, GREEDY: tl.constexpr, FLOOR: tl.constexpr, POLICY: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    which = tl.arange(0, MOST)
    peak_of, weight, peak, running, total = _totals(peaks, sums, row, chunks, MOST)
    spread = tl.log(total.to(tl.float32))  # taken off last: beside a large peak it would be rounded away
    if GREEDY:
        chunk = tl.min(tl.where(peak_of == peak, which, MOST - 1), 0)
        token = tl.load(best + row * chunks + tl.minimum(chunk, chunks - 1))
        tl.store(logprobs + row, 0.0 - spread)
    else:
        number = _uniform(tl.load(keys + row * key_stride), tl.load(drawn + row * drawn_stride))
        mark = number * total
        # Where rounding leaves nothing beyond the mark: the last that can be drawn.
        chunk = tl.min(tl.where(running > mark, which, MOST), 0)
        chunk = tl.where(chunk == MOST, tl.max(tl.where(weight > 0, which, 0), 0), chunk)
        before = tl.sum(tl.where(which == chunk - 1, running, 0.0), 0)
        own = tl.sum(tl.where(which == chunk, peak_of, 0.0), 0)
        own = tl.where(own == float("-inf"), 0.0, own)
        at = tl.arange(0, CHUNK)
        z = _left(logits, floors, row, stride, chunk * CHUNK + at, vocab, inverse, FLOOR)
        p = tl.exp(z - own).to(tl.float64)
        rest = (mark - before) / tl.exp(own - peak).to(tl.float64)
        place = tl.min(tl.where(tl.cumsum(p, 0) > rest, at, CHUNK), 0)
        place = tl.where(place == CHUNK, tl.max(tl.where(p > 0, at, 0), 0), place)
        token = tl.minimum(chunk * CHUNK + place, vocab - 1)
        tl.store(logprobs + row, tl.sum(tl.where(at == place, z, 0.0), 0) - peak - spread)
    tl.store(tokens + row, token.to(tl.int64))
    if POLICY:
        _, _, policy_peak, _, policy_total = _totals(policy_peaks, policy_sums, row, chunks, MOST)
        z_token = tl.load(policy + row * policy_stride + token) * inverse
        tl.store(policy_logprobs + row, z_token - policy_peak - tl.log(policy_total.to(tl.float32)))


def _sums(
    logits_SV: Tensor, floors: Tensor | None, inverse: float, best: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Peak and sum of each chunk of each row, [S, chunks]; where `best` is given, which token is the largest."""
    assert logits_SV.stride(1) == 1, "a row of logits must be contiguous"
    rows, vocab = logits_SV.shape
    chunks = triton.cdiv(vocab, CHUNK)
    peaks = torch.empty(rows, chunks, dtype=torch.float32, device=logits_SV.device)
    sums = torch.empty(rows, chunks, dtype=torch.float64, device=logits_SV.device)
    _chunk_sums[(rows, chunks)](
        logits_SV, floors, peaks, sums, best, logits_SV.stride(0), vocab, inverse,
        CHUNK=CHUNK, GREEDY=best is not None, FLOOR=floors is not None, num_warps=8, **early(logits_SV),
    )  # fmt: skip
    return peaks, sums


def draw(
    logits_SV: Tensor,
    keys_S: Tensor,
    drawn_S: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    policy_SV: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, vocab = logits_SV.shape
    chunks, device, greedy = triton.cdiv(vocab, CHUNK), logits_SV.device, temperature == 0
    inverse = 1.0 if greedy else 1.0 / temperature
    best = torch.empty(rows, chunks, dtype=torch.int32, device=device) if greedy else None
    peaks, sums = _sums(logits_SV, None, inverse, best)
    policy_SV = logits_SV if policy_SV is None else policy_SV
    policy_peaks, policy_sums = (peaks, sums) if policy_SV is logits_SV else _sums(policy_SV, None, inverse)
    floors = None
    if not greedy and (0 < top_k < vocab or top_p < 1.0 or min_p > 0.0):
        floors = floors_of(logits_SV, peaks, sums, CHUNK, temperature, top_k, top_p, min_p)
        peaks, sums = _sums(logits_SV, floors, inverse)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=device)
    apart = floors is not None or policy_SV is not logits_SV
    policy_logprobs = torch.empty_like(logprobs) if apart else logprobs
    _pick[(rows,)](
        logits_SV, policy_SV, floors, peaks, sums, best, policy_peaks, policy_sums, keys_S, drawn_S,
        tokens, logprobs, policy_logprobs,
        logits_SV.stride(0), policy_SV.stride(0), keys_S.stride(0), drawn_S.stride(0), vocab, chunks, inverse,
        CHUNK=CHUNK, MOST=triton.next_power_of_2(chunks), GREEDY=greedy, FLOOR=floors is not None, POLICY=apart,
        num_warps=8, **early(logits_SV),
    )  # fmt: skip
    return tokens, logprobs, policy_logprobs
