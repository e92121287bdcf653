"""The launch of `fp4_wgmma.cu`: up to some 1500 rows, one kernel for the product, bias, LoRA and SwiGLU, on Hopper."""

import ctypes
from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from qerl.kernels.fp4_tiles import INPUTS, Tiles
from qerl.kernels.gpu.cuda import (
    BFLOAT16,
    INT64,
    MOST_RANK,
    SWIZZLE_128,
    Kernel,
    TensorMap,
    address,
    compiles_for_hopper,
    tensor_map,
)
from qerl.kernels.gpu.fp4_skinny import SMALL
from qerl.kernels.gpu.launch import processors, zeros
from qerl.kernels.low_rank import LowRank

MOST_ROWS = 1535
POINTERS = ("divisor", "bias", "a", "b", "column", "y", "low", "parts", "a_parts", "counts")
NUMBERS = (
    "m", "n", "k", "strips", "k_tiles", "k_units", "m_tiles", "waves", "per", "total", "a_strips", "a_each", "a_more",
)  # fmt: skip


class _Args(ctypes.Structure):
    _fields_ = [
        *((name, TensorMap) for name in ("x_map", "words_map", "scales_map", "low_map")),
        *((name, c_void_p) for name in POINTERS),
        ("scale", c_float),
        *((name, c_int) for name in NUMBERS),
        ("padding", c_int * 14),  # the kernel's structure is aligned to 64 bytes, and so long is what a launch reads
    ]


@dataclass(frozen=True)
class WgmmaPlan:
    """How a launch is cut: tiles of 64 cw rows of the weight and bm rows of x."""

    bm: int
    cw: int  # warpgroups that multiply
    stages: int  # of the ring, 128 inputs each
    registers: int = 0  # of a thread that multiplies, and of the others; 0: as they come
    others: int = 0

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return 1024 + self.stages * (2 * (self.bm * 128 + self.cw * 4 * 576) + 16) + 8


# Weights by strips times tiles, as SMALL is. By bm: cw and stages, as they came out best on an H200 for Qwen2.5, of
# large weights and of the rest.
LARGE, LARGEST = 50_000, 200_000
CUTS_OF_LARGE = {16: (3, 8), 32: (3, 8), 48: (3, 7), 64: (3, 6), 128: (2, 5)}
CUTS = {16: (2, 9), 32: (2, 9), 48: (2, 9), 64: (2, 8), 96: (2, 6), 128: (2, 5)}
OF_96 = WgmmaPlan(96, 3, 5, registers=144, others=64)
OF_192 = WgmmaPlan(192, 2, 3, registers=208, others=88)
OF_128 = WgmmaPlan(128, 3, 4, registers=144, others=64)
OF_256 = WgmmaPlan(256, 2, 3, registers=208, others=88)


def wgmma_plan(strips: int, k_tiles: int, rows: int) -> WgmmaPlan:
    """For a weight of so many strips of 16 rows and tiles of 64 inputs, and so many rows of x."""
    size = strips * k_tiles
    if size < SMALL and 64 < rows <= 256:  # as many tiles as there are multiprocessors matter more than x read often
        return WgmmaPlan(48, 3, 7) if rows <= 96 else WgmmaPlan(64, 3, 6)
    if size >= LARGE and 64 < rows <= 96:
        return OF_96
    if rows <= 128:
        cuts = CUTS_OF_LARGE if size >= LARGE else CUTS
        bm = next(bm for bm in cuts if rows <= bm)
        return WgmmaPlan(bm, *cuts[bm])
    if rows <= 192:
        return OF_192 if size >= LARGE else OF_96
    return OF_256 if size >= LARGEST else OF_128


def wgmma_serves(x: Tensor, tiles: Tiles, low: LowRank | None) -> bool:
    """Whether the kernel takes this, on Hopper; with more rows dequantization pays."""
    (outputs, inputs), rank = tiles.shape, low.rank if low is not None else 0
    fits = len(x) <= MOST_ROWS and inputs % INPUTS == 0 and outputs % 2 == 0 and rank <= MOST_RANK
    return fits and compiles_for_hopper(x.device)


def wgmma_linear(
    x: Tensor, tiles: Tiles, bias: Tensor | None, low: LowRank | None, paired: bool, plan: WgmmaPlan
) -> Tensor:
    """x bf16 [M, K], rows 16-byte aligned, K a multiple of 64 -> bf16 [M, N], N even.

    paired: silu(first half) * second, [M, N / 2], of interleaved tiles.
    """
    assert tiles.interleaved or not paired, "gate and up must be interleaved"
    rows, (outputs, inputs) = len(x), tiles.shape
    strips, k_tiles = tiles.words.shape[:2]
    m_tiles, k_units = -(-rows // plan.bm), -(-k_tiles // 2)
    count, most = -(-strips // (4 * plan.cw)) * m_tiles, processors(x)
    waves, left = divmod(count, most)
    total, extra = left * k_units, m_tiles * k_units if low is not None else 0
    per = max(1, -(-(total + extra) // most))
    grid = most if waves else -(-(total + extra) // per)
    y = x.new_empty(rows, outputs // 2 if paired else outputs)
    parts = x.new_empty(2 * grid * 64 * plan.cw * plan.bm if total else 1, dtype=torch.float32)
    a_strips, padded = len(low.a) // 16 if low is not None else 0, -(-rows // 8) * 8
    a_parts = x.new_empty(max(1, k_units * a_strips * padded * 16), dtype=torch.float32)
    inner = x.new_empty(padded, max(1, a_strips) * 16)  # scale x A^T

    arguments = _Args(
        tensor_map(x, BFLOAT16, (64, rows, k_tiles), (2 * x.stride(0), 128), (64, plan.bm, 2), SWIZZLE_128),
        *(
            tensor_map(tensor, INT64, (each, k_tiles, strips), (8 * each, 8 * each * k_tiles), (each, 2, 4 * plan.cw))
            for tensor, each in ((tiles.words, 64), (tiles.scales, 8))
        ),
        tensor_map(inner, BFLOAT16, (inner.shape[1], padded), (2 * inner.shape[1],), (64, plan.bm), SWIZZLE_128),
        address(tiles.divisor_N), address(bias), address(low.a if low else None), address(low.b if low else None),
        address(low.column if low else None), address(y), address(inner), address(parts), address(a_parts),
        address(zeros(x.device)), low.scale if low else 0.0, rows, outputs, inputs, strips, k_tiles, k_units, m_tiles,
        waves, per, total, a_strips, *divmod(extra, grid),
    )  # fmt: skip
    kernel = _kernel(plan, low.rank if low is not None else 0, tiles.interleaved, paired, x.device)
    kernel.launch(grid, 128 * plan.cw + 128, plan.shared, arguments)
    return y


@cache
def _kernel(plan: WgmmaPlan, rank: int, interleaved: bool, paired: bool, device: torch.device) -> Kernel:
    defines = {"BM": plan.bm, "CW": plan.cw, "STAGES": plan.stages, "RANK": rank}
    defines |= {"REGISTERS": plan.registers, "OTHERS": plan.others}
    defines |= {"INTERLEAVED": int(interleaved), "PAIRED": int(paired)}
    source = Path(__file__).with_name("fp4_wgmma.cu")
    return Kernel(source, "linear", defines, device, plan.shared, before=_instruction(plan.bm))


def _instruction(bm: int) -> str:
    """C++ of `multiply`: d [64, bm] += a [64, 16] x^T, the sums' bm / 2 registers spelled out."""
    n = bm // 2
    sums = ", ".join(f"%{i}" for i in range(n))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(n))
    return f"""
static __device__ __forceinline__ void multiply(float *d, const u32 *a, u64 x, int add) {{
    asm volatile("{{\\n .reg .pred p;\\n setp.ne.b32 p, %{n + 5}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{bm}k16.f32.bf16.bf16 {{{sums}}}, {{%{n}, %{n + 1}, %{n + 2}, %{n + 3}}}, "
        "%{n + 4}, p, 1, 1, 0;\\n}}"
        : {operands} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "r"(add));
}}
"""
