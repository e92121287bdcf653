"""What the Triton products over tiled 4-bit weights share, whatever the format: order, cuts, and sums across programs.

The product is formed the other way round, y^T = W x^T: the weight is the tensor cores' left operand, which may lie in
registers, so codes never return to shared memory. Work is cut into units of (output tile, piece of K), and each program
takes an equal run of them, whatever tiles it crosses. Where a tile's pieces fall to several programs, each writes its
float32 part and the last to arrive adds them up in their order: nothing is added atomically, and the result is the same
every time.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.gpu.launch import processors

MANY_STRIPS = 1024  # of a wide weight


@dataclass(frozen=True)
class Plan:
    """A cut of a `linear_kernel`: tiles of 64 nr x bm outputs and 64 kr inputs."""

    nr: int
    kr: int
    bm: int
    warps: int
    stages: int
    programs: int  # for each multiprocessor; 0: one for each tile


Cuts = dict[int, tuple[int, int, int, int, int]]  # nr, kr, warps, stages, programs by bm


def plan_for(rows: int, words: Tensor, wide: Cuts, narrow: Cuts, sizes: tuple[int, ...] = ()) -> Plan:
    """What is sound for a weight [strips, k_tiles, ...]; sizes: N of the parts, where LoRA has values for each."""
    strips, k_tiles = words.shape[:2]
    bm = next(bm for bm in (16, 32, 64, 128) if rows <= bm or bm == 128)
    nr, kr, warps, stages, programs = (wide if strips >= MANY_STRIPS else narrow)[bm]
    nr = nr if strips % (4 * nr) == 0 and all(size % (64 * nr) == 0 for size in sizes[:-1]) else 1
    return Plan(nr, kr if k_tiles % kr == 0 else 1, bm, warps, stages, programs)


def units(x: Tensor, words: Tensor, plan: Plan) -> tuple[int, int, int, Tensor]:
    """Programs, units of each and of all, and room for what programs leave to each other."""
    strips, k_tiles = words.shape[:2]
    pieces = k_tiles // plan.kr
    total = strips // (4 * plan.nr) * -(-len(x) // plan.bm) * pieces
    per = -(-total // (plan.programs * processors(x))) if plan.programs else pieces
    grid = -(-total // per)
    room = 2 * grid * 64 * plan.nr * plan.bm if per % pieces else 1
    return grid, per, total, x.new_empty(room, dtype=torch.float32)


@triton.jit
def four(a, b, c, d):
    """The pairs j = 0..3, joined along new last axes: row half, input half."""
    return tl.join(tl.join(a, b), tl.join(c, d))


@triton.jit
def matrix(even, odd, NR: tl.constexpr, KR: tl.constexpr):
    """What a tile's lanes hold of the even and the odd inputs -> [64 NR, 64 KR]. On a GPU nothing moves."""
    both = tl.reshape(tl.join(even, odd), (KR, NR, 4, 8, 4, 2, 2, 2, 2, 2))
    # kr, nr, strip, g, t, k16 / 2, row half, input half, k16 % 2, k0 -> nr, strip, row half, g | kr, k16, half, t, k0
    return tl.reshape(tl.permute(both, (1, 2, 6, 3, 0, 5, 8, 7, 4, 9)), (NR * 64, KR * 64))


@triton.jit
def offsets(K_TILES, NR: tl.constexpr, KR: tl.constexpr, WIDTH: tl.constexpr):
    """Of a tile's words (WIDTH 128) or scales (16) from those of its first: [KR NR, 4 strips, WIDTH]."""
    pair = tl.arange(0, KR * NR)
    strip = (pair % NR)[:, None] * 4 + tl.arange(0, 4)[None, :]
    at = strip * K_TILES + (pair // NR)[:, None]
    return (at * WIDTH)[:, :, None] + tl.arange(0, WIDTH)[None, None, :]


@triton.jit
def summed(acc, tile, whole, pieces, per, parts, counts, BN: tl.constexpr, BM: tl.constexpr):
    """The tile's sum, and whether it is complete here. Where it is not `whole`, acc is left in `parts`, and the last
    program to arrive has all of them; counts are 0 before and after."""
    ready = whole
    if not whole:
        program = tl.program_id(0)
        owner, closer = tile * pieces // per, (tile * pieces + pieces - 1) // per
        at = tl.arange(0, BN)[:, None] + tl.arange(0, BM)[None, :] * BN
        slot = 2 * program + tl.where(program * per // pieces == tile, 0, 1)
        tl.store(parts + slot.to(tl.int64) * (BN * BM) + at, acc)
        tl.debug_barrier()
        ready = tl.atomic_add(counts + tile, 1, sem="acq_rel") == closer - owner
        if ready:
            acc = tl.zeros((BN, BM), dtype=tl.float32)
            for other in tl.range(owner, closer + 1, num_stages=1):
                slot = 2 * other + tl.where(other * per // pieces == tile, 0, 1)
                acc += tl.load(parts + slot.to(tl.int64) * (BN * BM) + at, cache_modifier=".cg")
            tl.store(counts + tile, 0)
    return acc, ready
