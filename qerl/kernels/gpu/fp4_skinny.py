"""The launch of `fp4_skinny.cu`: at most 8 rows of x, one kernel for the product, bias, LoRA and SwiGLU."""

import ctypes
from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from qerl.kernels.fp4_tiles import ROWS, Tiles
from qerl.kernels.gpu.cuda import MOST_RANK, Kernel, address, compiles_for_hopper
from qerl.kernels.gpu.launch import zeros
from qerl.kernels.low_rank import LowRank

MOST_ROWS = 8
HEAVY = 4  # strips of W that a strip of LoRA's A weighs as much as
MOST_PARTS = 12  # that K is cut into
SMALL = 20_000  # strips times tiles: a weight whose launch is all latency
# Parts of K by strips and tiles of a weight, where they measured better on an H200 than what `skinny_plan` reckons:
# Qwen2.5's qkv, o and down of the 3B, qkv and o of the 7B.
MEASURED = {(160, 32): 4, (128, 32): 1, (128, 172): 5, (288, 56): 2, (224, 56): 4}
SHARED = 226 << 10  # of shared memory that a block may have on Hopper, a little left for the kernel's own
POINTERS = ("x", "words", "scales", "divisor", "bias", "a", "b", "column", "y", "parts", "counts")
NUMBERS = (
    "m", "n", "k", "x_stride", "strips", "a_strips", "k_tiles", "k_parts", "groups", "slots", "slots_at", "ring_at",
)  # fmt: skip


class _Args(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in POINTERS),
        ("scale", c_float),
        *((name, c_int) for name in NUMBERS),
    ]


@dataclass(frozen=True)
class SkinnyPlan:
    """How a launch is cut."""

    k_parts: int
    groups: int  # of strips; k_parts * groups blocks must fit on the GPU at once
    warps: int  # of a block
    stages: int  # of a warp's ring
    chunk: int  # units of a stage


def skinny_linear(
    x: Tensor, tiles: Tiles, bias: Tensor | None, low: LowRank | None, paired: bool, plan: SkinnyPlan
) -> Tensor:
    """x bf16 [M, K], M up to 8, rows 16-byte aligned -> bf16 [M, N].

    paired: silu(first half) * second, [M, N / 2], of interleaved tiles.
    """
    rows, (outputs, inputs) = len(x), tiles.shape
    strips, k_tiles = tiles.words.shape[:2]
    assert rows <= MOST_ROWS, "not for so many rows"
    assert x.stride(-1) == 1, "rows of x must be contiguous"
    assert tiles.interleaved or not paired, "gate and up must be interleaved"
    rank, a_strips = (low.rank, len(low.a) // ROWS) if low is not None else (0, 0)
    slots, slots_at, ring_at, shared = room(strips, k_tiles, a_strips, plan)
    kernel = _kernel(rank, tiles.interleaved, paired, plan, x.device)
    y = x.new_empty(rows, outputs // 2 if paired else outputs)
    parts = x.new_empty(plan.k_parts * (strips + a_strips) * ROWS * MOST_ROWS, dtype=torch.float32)
    counts = zeros(x.device)

    arguments = _Args(
        address(x), address(tiles.words), address(tiles.scales), address(tiles.divisor_N), address(bias),
        address(low.a if low else None), address(low.b if low else None), address(low.column if low else None),
        address(y), address(parts), address(counts), low.scale if low else 0.0,
        rows, outputs, inputs, x.stride(0), strips, a_strips, k_tiles, plan.k_parts, plan.groups,
        slots, slots_at, ring_at,
    )  # fmt: skip
    kernel.launch(plan.groups * plan.k_parts, 32 * plan.warps, shared, arguments)
    return y


def skinny_serves(x: Tensor, low: LowRank | None) -> bool:
    """Whether the kernel takes this, on Hopper, whose copy engine and shared memory it is cut for."""
    return len(x) <= MOST_ROWS and (low is None or low.rank <= MOST_RANK) and compiles_for_hopper(x.device)


def room(strips: int, k_tiles: int, a_strips: int, plan: SkinnyPlan) -> tuple[int, ...]:
    """Of the largest block: sums that a warp leaves, where they and the rings begin, bytes of shared memory in all."""
    cell = 4 * ROWS * MOST_ROWS
    most, least = -(-k_tiles // plan.k_parts), max(1, k_tiles // plan.k_parts)
    count = -(-(strips + HEAVY * a_strips) // plan.groups) + 1
    span = -(-count * most // plan.warps)
    slots = (span + least - 2) // least + 2
    slots_at = max(MOST_ROWS * (most * 128 + 16), a_strips * cell)  # x, and when it is used up, x A^T
    ring_at = -(-(slots_at + plan.warps * slots * cell) // 128) * 128
    return slots, slots_at, ring_at, ring_at + plan.warps * plan.stages * (576 * plan.chunk + 8) + 8


def skinny_plan(tiles: Tiles, low: LowRank | None, processors: int) -> SkinnyPlan:
    """One block for each multiprocessor; K cut as measured, else only as far as x must fit, or strips divide more
    evenly."""
    strips, k_tiles = tiles.words.shape[:2]
    a_strips = len(low.a) // ROWS if low is not None else 0
    measured = MEASURED.get((strips, k_tiles))

    def cost(plan: SkinnyPlan) -> int:  # units of the longest block, and its strips' sums written and read
        own = -(-strips // plan.groups)
        meet = 2 * own * (1 + plan.k_parts) if plan.k_parts > 1 else 0
        return own * -(-k_tiles // plan.k_parts) + meet

    best = (8, 2, 8) if strips * k_tiles < SMALL else (12, 3, 4)  # on an H200
    for cut in (best, (16, 2, 2), (8, 2, 2), (8, 2, 1), (4, 2, 1)):
        plans = [
            SkinnyPlan(parts, max(1, min(strips // 2, processors // parts)), *cut)
            for parts in range(1, min(k_tiles, MOST_PARTS, processors) + 1)
        ]
        fit = [plan for plan in plans if room(strips, k_tiles, a_strips, plan)[-1] <= SHARED]
        if fit:
            return next((plan for plan in fit if plan.k_parts == measured), min(fit, key=cost))
    raise ValueError(f"A weight of {tiles.shape[0]} x {tiles.shape[1]} does not fit the kernel for few rows.")


@cache
def _kernel(rank: int, interleaved: bool, paired: bool, plan: SkinnyPlan, device: torch.device) -> Kernel:
    defines = {"RANK": rank, "INTERLEAVED": int(interleaved), "PAIRED": int(paired)}
    defines |= {"WARPS": plan.warps, "STAGES": plan.stages, "CHUNK": plan.chunk, "HEAVY": HEAVY}
    return Kernel(Path(__file__).with_name("fp4_skinny.cu"), "skinny", defines, device, SHARED)
