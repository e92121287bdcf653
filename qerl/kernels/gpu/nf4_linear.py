"""y = x W^T + bias + LoRA over `nf4_tiles` on a GPU, without gradients; and the weight written out in bf16.

A code is looked up in its warp: lane i holds entry i mod 16 of the format's table, and a shuffle of 32 lanes gives each
the entry that its code names. Entry times absmax is float32, rounded once to bf16, bit for bit as the reference
dequantizes. Cut and summed as `tiled` says.

`ASM` picks the look-up in PTX; the interpreter reads the table from memory and multiplies in float32.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.gpu import tiled
from qerl.kernels.gpu.launch import early, product, wait, zeros
from qerl.kernels.gpu.low_rank import add_low_rank
from qerl.kernels.gpu.swiglu import swiglu
from qerl.kernels.gpu.tiled import Plan, four, matrix, offsets, summed, units
from qerl.kernels.low_rank import LowRank
from qerl.kernels.nf4_tiles import Nf4Tiles

DENSE_FROM = 192  # rows from which writing the weight out and cuBLAS pay

# Two words, absmax of rows g and g + 8, the table's address -> eight bf16 pairs. A shuffle within 16 lanes looks at the
# four low bits of its index alone: a code needs no mask.
_DECODE = tl.constexpr("""
{
 .reg .b32 i, entry;
 .reg .b64 at;
 .reg .f32 even, odd;
 mov.u32 i, %laneid;
 and.b32 i, i, 15;
 mad.wide.u32 at, i, 4, $12;
 ld.global.nc.b32 entry, [at];
 shfl.sync.idx.b32 even, entry, $8, 0x101f, 0xffffffff;                      mul.rn.f32 even, even, $10;
 shr.u32 i, $8, 16;  shfl.sync.idx.b32 odd, entry, i, 0x101f, 0xffffffff;    mul.rn.f32 odd, odd, $10;
 cvt.rn.bf16x2.f32 $0, odd, even;
 shr.u32 i, $8, 4;   shfl.sync.idx.b32 even, entry, i, 0x101f, 0xffffffff;   mul.rn.f32 even, even, $11;
 shr.u32 i, $8, 20;  shfl.sync.idx.b32 odd, entry, i, 0x101f, 0xffffffff;    mul.rn.f32 odd, odd, $11;
 cvt.rn.bf16x2.f32 $1, odd, even;
 shr.u32 i, $8, 8;   shfl.sync.idx.b32 even, entry, i, 0x101f, 0xffffffff;   mul.rn.f32 even, even, $10;
 shr.u32 i, $8, 24;  shfl.sync.idx.b32 odd, entry, i, 0x101f, 0xffffffff;    mul.rn.f32 odd, odd, $10;
 cvt.rn.bf16x2.f32 $2, odd, even;
 shr.u32 i, $8, 12;  shfl.sync.idx.b32 even, entry, i, 0x101f, 0xffffffff;   mul.rn.f32 even, even, $11;
 shr.u32 i, $8, 28;  shfl.sync.idx.b32 odd, entry, i, 0x101f, 0xffffffff;    mul.rn.f32 odd, odd, $11;
 cvt.rn.bf16x2.f32 $3, odd, even;
 shfl.sync.idx.b32 even, entry, $9, 0x101f, 0xffffffff;                      mul.rn.f32 even, even, $10;
 shr.u32 i, $9, 16;  shfl.sync.idx.b32 odd, entry, i, 0x101f, 0xffffffff;    mul.rn.f32 odd, odd, $10;
 cvt.rn.bf16x2.f32 $4, odd, even;
 shr.u32 i, $9, 4;   shfl.sync.idx.b32 even, entry, i, 0x101f, 0xffffffff;   mul.rn.f32 even, even, $11;
 shr.u32 i, $9, 20;  shfl.sync.idx.b32 odd, entry, i, 0x101f, 0xffffffff;    mul.rn.f32 odd, odd, $11;
 cvt.rn.bf16x2.f32 $5, odd, even;
 shr.u32 i, $9, 8;   shfl.sync.idx.b32 even, entry, i, 0x101f, 0xffffffff;   mul.rn.f32 even, even, $10;
 shr.u32 i, $9, 24;  shfl.sync.idx.b32 odd, entry, i, 0x101f, 0xffffffff;    mul.rn.f32 odd, odd, $10;
 cvt.rn.bf16x2.f32 $6, odd, even;
 shr.u32 i, $9, 12;  shfl.sync.idx.b32 even, entry, i, 0x101f, 0xffffffff;   mul.rn.f32 even, even, $11;
 shr.u32 i, $9, 28;  shfl.sync.idx.b32 odd, entry, i, 0x101f, 0xffffffff;    mul.rn.f32 odd, odd, $11;
 cvt.rn.bf16x2.f32 $7, odd, even;
}
""")


@triton.jit
def _looked_up(word, table, shift: tl.constexpr):
    return tl.load(table + ((word >> shift) & 15))


@triton.jit
def _half(word, upper, lower, table, shift: tl.constexpr):
    """The even (shift 0) or odd (16) inputs of a word, float32 [..., row half, input half]."""
    return four(
        _looked_up(word, table, shift) * upper,
        _looked_up(word, table, shift + 4) * lower,
        _looked_up(word, table, shift + 8) * upper,
        _looked_up(word, table, shift + 12) * lower,
    )


@triton.jit
def _decode(words, absmax, table, NR: tl.constexpr, KR: tl.constexpr, ASM: tl.constexpr):
    """words [KR NR, 4, 128] int32, absmax [KR NR, 4, 16] -> W bf16 [64 NR, 64 KR] (float32 without PTX)."""
    lanes: tl.constexpr = KR * NR * 32
    first, second = tl.split(tl.reshape(words, (lanes, 4, 2, 2)))  # of an even k16, of an odd one
    upper, lower = tl.split(tl.reshape(absmax, (lanes, 1, 1, 2)))
    upper, lower = tl.broadcast_to(upper, (lanes, 4, 2)), tl.broadcast_to(lower, (lanes, 4, 2))
    if ASM:
        a0, a1, a2, a3, b0, b1, b2, b3 = tl.inline_asm_elementwise(
            _DECODE,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,f,f,l",
            [first, second, upper, lower, table.to(tl.int64)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        bits = tl.join(four(a0, a1, a2, a3), four(b0, b1, b2, b3))  # [..., row half, input half, k16 % 2]
        even = (bits & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
        odd = ((bits >> 16) & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        even = tl.join(_half(first, upper, lower, table, 0), _half(second, upper, lower, table, 0))
        odd = tl.join(_half(first, upper, lower, table, 16), _half(second, upper, lower, table, 16))
    return matrix(even, odd, NR, KR)


@triton.jit(do_not_specialize=["M", "K_TILES", "per", "total"])
def linear_kernel(
    x, words, absmax, table, bias, y, parts, counts, M, N, K_TILES, per, total, x_stride,
    NR: tl.constexpr, KR: tl.constexpr, BM: tl.constexpr, BIAS: tl.constexpr, ASM: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y [M, N] bf16 = x W^T + bias. x [M, K] bf16, rows x_stride apart. parts, counts: scratch of shared tiles; counts
    are 0 before and after."""
    wait(EARLY)
    BN: tl.constexpr = 64 * NR
    BK: tl.constexpr = 64 * KR
    program = tl.program_id(0)
    m_tiles = tl.cdiv(M, BM)
    pieces = K_TILES // KR
    word_at, absmax_at = offsets(K_TILES, NR, KR, 128), offsets(K_TILES, NR, KR, 16)
    in_m, in_n, in_k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    unit = program * per
    end = tl.minimum(unit + per, total)
    while unit < end:
        tile = unit // pieces
        first = unit % pieces
        last = tl.minimum(pieces, first + end - unit)
        n0 = tile // m_tiles * BN
        rows_m = tile % m_tiles * BM + in_m
        x_at = x + tl.minimum(rows_m, M - 1)[None, :].to(tl.int64) * x_stride + in_k[:, None]
        strip0 = (n0 // 16).to(tl.int64) * K_TILES
        acc = tl.zeros((BN, BM), dtype=tl.float32)
        for piece in tl.range(first, last, num_stages=STAGES):
            base = strip0 + piece * KR
            held, largest = tl.load(words + base * 128 + word_at), tl.load(absmax + base * 16 + absmax_at)
            weight = _decode(held, largest, table, NR, KR, ASM)
            acc = product(weight, tl.load(x_at + piece * BK), acc, ASM)
        rows_n = n0 + in_n
        acc, ready = summed(acc, tile, last - first == pieces, pieces, per, parts, counts, BN, BM)
        if ready:
            if BIAS:
                acc += tl.load(bias + rows_n, mask=rows_n < N, other=0.0).to(tl.float32)[:, None]
            y_at = y + rows_m[None, :].to(tl.int64) * N + rows_n[:, None]
            tl.store(y_at, acc.to(y.dtype.element_ty), mask=(rows_m < M)[None, :] & (rows_n < N)[:, None])
        unit += last - first


@triton.jit
def dequantize_kernel(
    words, absmax, table, out, N, K, K_TILES, KR: tl.constexpr, ASM: tl.constexpr, EARLY: tl.constexpr
):
    """out [N, K] bf16 = table[code] absmax, rounded once."""
    wait(EARLY)
    pieces = K_TILES // KR
    n0, piece = tl.program_id(0) // pieces * 64, tl.program_id(0) % pieces
    base = (n0 // 16).to(tl.int64) * K_TILES + piece * KR
    held = tl.load(words + base * 128 + offsets(K_TILES, 1, KR, 128))
    weight = _decode(held, tl.load(absmax + base * 16 + offsets(K_TILES, 1, KR, 16)), table, 1, KR, ASM)
    rows_n, in_k = n0 + tl.arange(0, 64), piece * 64 * KR + tl.arange(0, 64 * KR)
    at = out + rows_n[:, None].to(tl.int64) * K + in_k[None, :]
    tl.store(at, weight.to(out.dtype.element_ty), mask=(rows_n < N)[:, None])


# nr, kr, warps, stages, programs by bm: of wide layers (gate and up), and of others.
# A thread has 64 weights at a time: with more, Triton moves them through shared memory.
WIDE = {16: (2, 1, 4, 4, 4), 32: (2, 1, 4, 4, 3), 64: (2, 1, 4, 4, 2), 128: (2, 1, 4, 4, 2)}
NARROW = {16: (1, 2, 4, 4, 4), 32: (1, 2, 4, 4, 3), 64: (1, 2, 4, 4, 2), 128: (1, 2, 4, 3, 1)}


def plan_for(rows: int, tiles: Nf4Tiles) -> Plan:
    """What is sound for a shape."""
    return tiled.plan_for(rows, tiles.words, WIDE, NARROW)


def tiled_nf4_linear(x: Tensor, tiles: Nf4Tiles, bias: Tensor | None, plan: Plan) -> Tensor:
    """The kernel, cut as `plan` says."""
    rows, outputs, k_tiles = len(x), tiles.shape[0], tiles.words.shape[1]
    grid, per, total, parts = units(x, tiles.words, plan)
    y = x.new_empty(rows, outputs)
    linear_kernel[(grid,)](
        x, tiles.words, tiles.absmax, tiles.table, bias if bias is not None else x, y, parts, zeros(x.device),
        rows, outputs, k_tiles, per, total, x.stride(0), NR=plan.nr, KR=plan.kr, BM=plan.bm, BIAS=bias is not None,
        ASM=x.is_cuda, STAGES=plan.stages, num_warps=plan.warps, **early(x),
    )  # fmt: skip
    return y


def dequantize_nf4(tiles: Nf4Tiles, out: Tensor | None = None) -> Tensor:
    """The weight, bf16 [N, K], bit for bit as the format's reference gives it; in `out` if there is one."""
    (outputs, inputs), k_tiles = tiles.shape, tiles.words.shape[1]
    if out is None:
        out = torch.empty(outputs, inputs, dtype=torch.bfloat16, device=tiles.words.device)
    kr = next(kr for kr in (4, 2, 1) if k_tiles % kr == 0)
    dequantize_kernel[(len(tiles.words) // 4 * (k_tiles // kr),)](
        tiles.words, tiles.absmax, tiles.table, out, outputs, inputs, k_tiles,
        KR=kr, ASM=out.is_cuda, num_warps=4, **early(out),
    )  # fmt: skip
    return out


def nf4_linear(
    x: Tensor, tiles: Nf4Tiles, bias: Tensor | None = None, low: LowRank | None = None, paired: bool = False
) -> Tensor:
    """x bf16 [M, K] -> bf16 [M, N]; paired: silu(first half) * second half, [M, N / 2]."""
    x = x if x.stride(-1) == 1 and x.stride(0) % 8 == 0 else x.contiguous()
    if len(x) < DENSE_FROM:
        y = tiled_nf4_linear(x, tiles, bias, plan_for(len(x), tiles))
    else:
        y = F.linear(x, dequantize_nf4(tiles), bias)
    if low is not None:
        add_low_rank(y, x, low)
    return swiglu(y) if paired else y
