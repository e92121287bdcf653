"""Triton kernels over `fp4_tiles`: the product with few rows, and the weight written out in bf16.

Cut and summed as `tiled` says. Low-rank columns (LoRA) come in as a last piece of K.

`ASM` picks the conversion in PTX; the interpreter, which has none and no bf16 products, takes plain Triton in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.fp4_tiles import Tiles
from qerl.kernels.gpu import tiled
from qerl.kernels.gpu.launch import early, product, wait, zeros
from qerl.kernels.gpu.low_rank import inner
from qerl.kernels.gpu.tiled import Plan, four, matrix, offsets, summed, units
from qerl.kernels.low_rank import LowRank

# Two words and their scales' four bytes -> eight bf16 pairs. A pair is a shift and a mask away from |code| 2^-126; byte
# b becomes the bf16 0x7000 | b << 4 in both halves. Products are v s + (-0): Ampere and Ada can't just multiply bf16.
_DECODE = tl.constexpr("""
{
 .reg .b32 v, w, low, high, none;
 mov.b32 none, 0x80008000;
 prmt.b32 low, $10, 0, 0x4040;   mad.lo.u32 low, low, 16, 0x70007000;
 prmt.b32 high, $10, 0, 0x4141;  mad.lo.u32 high, high, 16, 0x70007000;
 and.b32 v, $8, 0x81C081C0;                            fma.rn.bf16x2 $0, v, low, none;
 shl.b32 v, $8, 3;   and.b32 v, v, 0x81C081C0;         fma.rn.bf16x2 $1, v, high, none;
 shl.b32 v, $8, 6;   and.b32 v, v, 0x81C081C0;         fma.rn.bf16x2 $2, v, low, none;
 shl.b32 v, $8, 1;   and.b32 v, v, 0x80008000;
 shr.u32 w, $8, 3;   lop3.b32 v, w, 0x01800180, v, 0xEA;
 shr.u32 w, $8, 7;   lop3.b32 v, w, 0x00400040, v, 0xEA;  fma.rn.bf16x2 $3, v, high, none;
 prmt.b32 low, $10, 0, 0x4242;   mad.lo.u32 low, low, 16, 0x70007000;
 prmt.b32 high, $10, 0, 0x4343;  mad.lo.u32 high, high, 16, 0x70007000;
 and.b32 v, $9, 0x81C081C0;                            fma.rn.bf16x2 $4, v, low, none;
 shl.b32 v, $9, 3;   and.b32 v, v, 0x81C081C0;         fma.rn.bf16x2 $5, v, high, none;
 shl.b32 v, $9, 6;   and.b32 v, v, 0x81C081C0;         fma.rn.bf16x2 $6, v, low, none;
 shl.b32 v, $9, 1;   and.b32 v, v, 0x80008000;
 shr.u32 w, $9, 3;   lop3.b32 v, w, 0x01800180, v, 0xEA;
 shr.u32 w, $9, 7;   lop3.b32 v, w, 0x00400040, v, 0xEA;  fma.rn.bf16x2 $7, v, high, none;
}
""")


@triton.jit
def _pairs(word):
    """A word's four pairs, as bits of two bf16 each."""
    mask: tl.constexpr = -0x7E3F7E40  # 0x81C081C0
    last = ((word << 1) & -0x7FFF8000) | ((word >> 3) & 0x01800180) | ((word >> 7) & 0x00400040)
    return word & mask, (word << 3) & mask, (word << 6) & mask, last


@triton.jit
def _scale(scales, byte: tl.constexpr):
    return (0x70000000 | (((scales >> (8 * byte)) & 0xFF) << 20)).to(tl.float32, bitcast=True)


@triton.jit
def _decode(words, scales, NR: tl.constexpr, KR: tl.constexpr, ASM: tl.constexpr):
    """words [KR NR, 4, 128], scales [KR NR, 4, 16] int32 -> W 2^-7 bf16 [64 NR, 64 KR] (float32 without PTX)."""
    lanes: tl.constexpr = KR * NR * 32
    first, second = tl.split(tl.reshape(words, (lanes, 4, 2, 2)))
    scale = tl.broadcast_to(tl.reshape(scales, (lanes, 1, 2)), (lanes, 4, 2))
    if ASM:
        a0, a1, a2, a3, b0, b1, b2, b3 = tl.inline_asm_elementwise(
            _DECODE,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r",
            [first, second, scale],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        bits = tl.join(four(a0, a1, a2, a3), four(b0, b1, b2, b3))  # [..., row half, input half, k16 % 2]
        even = (bits & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
        odd = ((bits >> 16) & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        a0, a1, a2, a3 = _pairs(first)
        b0, b1, b2, b3 = _pairs(second)
        bits = tl.join(four(a0, a1, a2, a3), four(b0, b1, b2, b3))
        s0, s1, s2, s3 = _scale(scale, 0), _scale(scale, 1), _scale(scale, 2), _scale(scale, 3)
        factor = tl.join(four(s0, s1, s0, s1), four(s2, s3, s2, s3))
        even = (bits << 16).to(tl.float32, bitcast=True) * factor
        odd = (bits & -65536).to(tl.float32, bitcast=True) * factor
    return matrix(even, odd, NR, KR)


@triton.jit
def _over(scale, divisor, KR: tl.constexpr):
    """scale 2^-119 / divisor, as the format's reference rounds it, for the four lanes that share it."""
    return tl.broadcast_to(
        tl.div_rn(scale * 1.504632769052528e-36, tl.broadcast_to(divisor, (KR * 32, 1, 2))), (KR * 32, 4, 2)
    )


@triton.jit
def _outputs(n0, N, BN: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rows of the weight as the file has them, of the BN rows that lie from n0 on in tiles."""
    at = n0 + tl.arange(0, BN)
    if INTERLEAVED:  # gate and up, eight rows of each by turns
        return at // 16 * 8 + at % 8 + at // 8 % 2 * (N // 2)
    else:
        return at


@triton.jit(do_not_specialize=["M", "K_TILES", "per", "total"])
def linear_kernel(
    x, words, scales, divisor, bias, low, up, column, y, parts, counts, M, N, K, K_TILES, per, total, x_stride,
    NR: tl.constexpr, KR: tl.constexpr, BM: tl.constexpr, R: tl.constexpr, BIAS: tl.constexpr,
    EVEN: tl.constexpr, INTERLEAVED: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y [M, N] bf16 = x W^T / divisor + bias + low up^T.

    x [M, K] bf16, rows x_stride apart; low [M, *] bf16: LoRA's inner values, scaled, of which rows of W in group g of
    64 read R columns from column[g] on; up [N, R] bf16. parts, counts: scratch of shared tiles; counts are 0 before and
    after. EVEN: K is a multiple of 64 KR. R = 0: no low rank. INTERLEAVED: a tile has as many rows of gate as of up,
    and each go to their place in y.
    """
    wait(EARLY)
    BN: tl.constexpr = 64 * NR
    BK: tl.constexpr = 64 * KR
    program = tl.program_id(0)
    m_tiles = tl.cdiv(M, BM)
    pieces = K_TILES // KR
    word_at, scale_at = offsets(K_TILES, NR, KR, 128), offsets(K_TILES, NR, KR, 16)
    in_m, in_n, in_k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    halves: tl.constexpr = 2 if INTERLEAVED else 1
    unit = program * per
    end = tl.minimum(unit + per, total)
    while unit < end:
        tile = unit // pieces
        first = unit % pieces
        last = tl.minimum(pieces, first + end - unit)
        n0 = tile // m_tiles * BN
        rows_m = tile % m_tiles * BM + in_m
        kept_m = tl.minimum(rows_m, M - 1)
        x_at = x + kept_m[None, :].to(tl.int64) * x_stride + in_k[:, None]
        strip0 = (n0 // 16).to(tl.int64) * K_TILES
        acc = tl.zeros((BN, BM), dtype=tl.float32)
        for piece in tl.range(first, last, num_stages=STAGES):
            base = strip0 + piece * KR
            weight = _decode(tl.load(words + base * 128 + word_at), tl.load(scales + base * 16 + scale_at), NR, KR, ASM)
            if EVEN:
                values = tl.load(x_at + piece * BK)
            else:
                values = tl.load(x_at + piece * BK, mask=(piece * BK + in_k < K)[:, None], other=0.0)
            acc = product(weight, values, acc, ASM)
        rows_n = _outputs(n0, N, BN, INTERLEAVED)
        acc, ready = summed(acc, tile, last - first == pieces, pieces, per, parts, counts, BN, BM)
        if ready:
            acc = acc * (128.0 / tl.load(divisor + n0 + in_n))[:, None]
            if BIAS:
                acc += tl.load(bias + rows_n, mask=rows_n < N, other=0.0).to(tl.float32)[:, None]
            if R > 0:
                in_r = tl.arange(0, R)
                width = tl.load(column + tl.cdiv(N, 64))  # of a row of `low`
                for half in tl.static_range(halves):  # gate and up have values of their own
                    first_n, end_n = n0 // halves + half * (N // halves), (half + 1) * (N // halves)
                    theirs = (rows_n >= first_n) & (rows_n < end_n)
                    begin = tl.load(column + first_n // 64)
                    factor = tl.load(up + rows_n[:, None] * R + in_r[None, :], mask=theirs[:, None], other=0.0)
                    inner = tl.load(low + kept_m[None, :] * width + begin + in_r[:, None])
                    acc = product(factor, inner, acc, ASM)
            y_at = y + rows_m[None, :].to(tl.int64) * N + rows_n[:, None]
            tl.store(y_at, acc.to(y.dtype.element_ty), mask=(rows_m < M)[None, :] & (rows_n < N)[:, None])
        unit += last - first


@triton.jit
def dequantize_kernel(
    words, scales, divisor, out, N, K, K_TILES, KR: tl.constexpr, INTERLEAVED: tl.constexpr, EARLY: tl.constexpr
):
    """out [N, K] bf16 = code (scale / divisor), rounded once: bit for bit what the format's reference gives."""
    wait(EARLY)
    program = tl.program_id(0)
    pieces = K_TILES // KR
    n0, piece = program // pieces * 64, program % pieces
    base = (n0 // 16).to(tl.int64) * K_TILES + piece * KR
    words_ = tl.load(words + base * 128 + offsets(K_TILES, 1, KR, 128))
    scales_ = tl.load(scales + base * 16 + offsets(K_TILES, 1, KR, 16))
    lane = tl.arange(0, KR * 32) % 32
    row = n0 + lane // 8 * 16 + lane % 8
    upper, lower = tl.load(divisor + row)[:, None, None], tl.load(divisor + row + 8)[:, None, None]
    scale = tl.reshape(scales_, (KR * 32, 1, 2))
    s0, s1 = _over(_scale(scale, 0), upper, KR), _over(_scale(scale, 1), lower, KR)
    s2, s3 = _over(_scale(scale, 2), upper, KR), _over(_scale(scale, 3), lower, KR)
    factor = tl.join(four(s0, s1, s0, s1), four(s2, s3, s2, s3))
    first, second = tl.split(tl.reshape(words_, (KR * 32, 4, 2, 2)))
    a0, a1, a2, a3 = _pairs(first)
    b0, b1, b2, b3 = _pairs(second)
    bits = tl.join(four(a0, a1, a2, a3), four(b0, b1, b2, b3))
    even = ((bits << 16).to(tl.float32, bitcast=True) * 8.507059173023462e37) * factor
    odd = ((bits & -65536).to(tl.float32, bitcast=True) * 8.507059173023462e37) * factor
    weight = matrix(even, odd, 1, KR)
    rows_n = _outputs(n0, N, 64, INTERLEAVED)
    in_k = piece * 64 * KR + tl.arange(0, 64 * KR)
    at = out + rows_n[:, None].to(tl.int64) * K + in_k[None, :]
    tl.store(at, weight.to(out.dtype.element_ty), mask=(rows_n < N)[:, None] & (in_k < K)[None, :])


# nr, kr, warps, stages, programs by bm, as they came out best on an H200 for Qwen2.5: gate and up, and the rest.
WIDE = {16: (2, 2, 4, 4, 3), 32: (2, 2, 4, 4, 2), 64: (2, 1, 4, 4, 2), 128: (2, 1, 4, 4, 2)}
NARROW = {16: (1, 2, 4, 4, 3), 32: (1, 2, 4, 4, 3), 64: (1, 2, 4, 4, 2), 128: (1, 2, 4, 3, 1)}


def tiled_linear(x: Tensor, tiles: Tiles, bias: Tensor | None, low: LowRank | None, plan: Plan) -> Tensor:
    """The Triton kernel, cut as `plan` says; LoRA's inner product is a launch of its own."""
    rows, (outputs, inputs), k_tiles = len(x), tiles.shape, tiles.words.shape[1]
    grid, per, total, parts = units(x, tiles.words, plan)
    y = x.new_empty(rows, outputs)
    low_values = inner(x, low) if low is not None else x
    linear_kernel[(grid,)](
        x, tiles.words, tiles.scales, tiles.divisor_N, bias if bias is not None else x, low_values,
        low.b if low is not None else x, low.column if low is not None else x, y, parts, zeros(x.device),
        rows, outputs, inputs, k_tiles, per, total, x.stride(0),
        NR=plan.nr, KR=plan.kr, BM=plan.bm, R=low.rank if low is not None else 0, BIAS=bias is not None,
        EVEN=inputs % (64 * plan.kr) == 0, INTERLEAVED=tiles.interleaved, ASM=x.is_cuda, STAGES=plan.stages,
        num_warps=plan.warps, **early(x),
    )  # fmt: skip
    return y


def dequantize_tiles(tiles: Tiles, out: Tensor | None = None) -> Tensor:
    """The weight, bf16 [N, K], bit for bit as the format's reference gives it; in `out` if there is one."""
    (outputs, inputs), k_tiles = tiles.shape, tiles.words.shape[1]
    if out is None:
        out = torch.empty(outputs, inputs, dtype=torch.bfloat16, device=tiles.words.device)
    kr = next(kr for kr in (4, 2, 1) if k_tiles % kr == 0)
    grid = (len(tiles.words) // 4 * (k_tiles // kr),)
    dequantize_kernel[grid](
        tiles.words, tiles.scales, tiles.divisor_N, out, outputs, inputs, k_tiles,
        KR=kr, INTERLEAVED=tiles.interleaved, num_warps=4, **early(out),
    )  # fmt: skip
    return out


def plan_for(rows: int, tiles: Tiles, sizes: tuple[int, ...] = ()) -> Plan:
    """What is sound for a shape; sizes: N of the parts, where LoRA has its own values for each."""
    return tiled.plan_for(rows, tiles.words, WIDE, NARROW, sizes)
