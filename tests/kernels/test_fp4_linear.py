"""Every kernel of a 4-bit linear against float32: in bf16 on a GPU, else Triton's, in its interpreter and float32."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qerl.bench.linear import layers
from qerl.kernels.fp4_tiles import Tiles, tile
from qerl.kernels.gpu import fp4_linear as public
from qerl.kernels.gpu.fp4_skinny import MEASURED, SkinnyPlan, room, skinny_linear, skinny_plan
from qerl.kernels.gpu.fp4_tiled import dequantize_tiles, tiled_linear
from qerl.kernels.gpu.fp4_wgmma import WgmmaPlan, wgmma_linear, wgmma_plan
from qerl.kernels.gpu.low_rank import add_low_rank
from qerl.kernels.gpu.tiled import Plan
from qerl.kernels.low_rank import LowRank, low_rank_buffers, low_rank_reference
from qerl.model.shapes import SHAPES as SHAPE_NAMES
from qerl.model.shapes import shape_named
from qerl.quant import mxfp4, nvfp4
from tests.kernels.devices import DEVICE, judge, normal

ON_GPU = DEVICE == "cuda"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
# N of the parts, K, rank: odd ones, and those of Qwen2.5 0.5B and 7B.
ODD = [((60,), 80, 8), ((128, 64, 64), 192, 16), ((320,), 208, 64), ((128, 128), 256, 16)]
REAL = [((896, 128, 128), 896, 32), ((4864, 4864), 896, 32), ((896,), 4864, 128), ((3584, 512, 512), 3584, 32)]
GATE_UP = [((64, 64), 192, 16), ((192, 192), 128, 32), pytest.param((4864, 4864), 896, 32, marks=pytest.mark.gpu)]
SHAPES = [*ODD, *(pytest.param(*shape, marks=pytest.mark.gpu) for shape in REAL)]


@dataclass(frozen=True)
class Case:
    """A fused projection with everything that may come with it."""

    tiles: Tiles
    exact_NK: Tensor  # float32
    bias: Tensor
    low: LowRank

    def judged(self, run: Callable[[Tensor], Tensor], rows: int, gated: bool = False, lora: bool = True) -> None:
        x = normal(rows, self.exact_NK.shape[1], seed=rows, dtype=DTYPE)
        low = self.low
        wide = replace(low, a=low.a.float(), b=low.b.float())
        exact = x.float() @ self.exact_NK.t() + self.bias.float()
        plain = F.linear(x, self.exact_NK.to(DTYPE), self.bias)
        if lora:
            exact, plain = exact + low_rank_reference(x.float(), wide), plain + low_rank_reference(x, low)
        if gated:
            exact, plain = (F.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1] for y in (exact, plain))
        ours = run(x)
        judge(ours, plain, exact)
        assert torch.equal(run(x), ours), "the same call must give the same bits"


@cache
def case(sizes: tuple[int, ...], inputs: int, rank: int, form: str = "nvfp4", paired: bool = False) -> Case:
    formats = {"nvfp4": nvfp4, "mxfp4": mxfp4}
    weights = [normal(n, inputs, seed=i) * inputs**-0.5 * (i + 1) for i, n in enumerate(sizes)]
    parts = [formats[form].quantize(weight) for weight in weights]
    tiles = tile(parts, paired)
    assert tiles is not None
    exact = torch.cat([formats[form].dequantize(part) for part in parts])
    low = low_rank_buffers(sizes, inputs, rank, 2.0, DTYPE, exact.device)
    for i in range(len(sizes)):
        low.a[i * low.rank : i * low.rank + rank] = normal(rank, inputs, seed=9 + i) * inputs**-0.5
    low.b[:, :rank] = normal(sum(sizes), rank, seed=8) * 0.1
    return Case(tiles, exact, normal(sum(sizes), seed=7, dtype=DTYPE), low)


PLANS = [Plan(*cut) for cut in ((1, 1, 16, 4, 2, 3), (1, 1, 32, 4, 3, 0), (2, 2, 16, 4, 4, 3), (2, 1, 64, 8, 3, 2))]


def divides(plan: Plan, sizes: tuple[int, ...], inputs: int) -> bool:
    groups, k_tiles = -(-sum(sizes) // 64), -(-inputs // 64)
    return not (groups % plan.nr or k_tiles % plan.kr or any(size % (64 * plan.nr) for size in sizes[:-1]))


@pytest.mark.parametrize(
    ("sizes", "inputs", "rank", "plan"),
    [
        pytest.param(*shape, plan, marks=[pytest.mark.gpu] if shape in REAL else [])
        for shape in [*ODD, *REAL]
        for plan in PLANS
        if divides(plan, *shape[:2])
    ],
)
def test_the_tiled_kernel(sizes: tuple[int, ...], inputs: int, rank: int, plan: Plan) -> None:
    one = case(sizes, inputs, rank)
    for rows in (1, 5, 40) if not ON_GPU else (1, 8, 33, 100, 300):
        one.judged(lambda x: tiled_linear(x, one.tiles, one.bias, one.low, plan), rows)


@pytest.mark.parametrize("plan", [*PLANS[:2], PLANS[3]])
@pytest.mark.parametrize(("sizes", "inputs", "rank"), GATE_UP)
def test_the_tiled_kernel_puts_gate_and_up_in_their_places(
    sizes: tuple[int, ...], inputs: int, rank: int, plan: Plan
) -> None:
    one = case(sizes, inputs, rank, paired=True)
    assert one.tiles.interleaved
    for rows in (19,) if not ON_GPU else (1, 33, 300):
        one.judged(lambda x: tiled_linear(x, one.tiles, one.bias, one.low, plan), rows)
        one.judged(lambda x: tiled_linear(x, one.tiles, one.bias, None, plan), rows, lora=False)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(("sizes", "inputs", "rank"), [shape for shape in [*ODD, *REAL] if shape[1] % 32 == 0])
def test_what_is_chosen_by_itself(sizes: tuple[int, ...], inputs: int, rank: int, form: str) -> None:
    one = case(sizes, inputs, rank, form)
    for rows in (1, 3, 8, 9, 16, 17, 30, 64, 65, 128, 200, 300, 600, 1500):
        one.judged(lambda x: public.fp4_linear(x, one.tiles, one.bias, one.low), rows)
        if len(sizes) == 2:
            one.judged(lambda x: public.fp4_linear(x, one.tiles, one.bias, one.low, paired=True), rows, gated=True)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(("sizes", "inputs", "rank"), [*GATE_UP, ((32, 32), 128, 16), ((96, 96), 80, 16)])
def test_gate_and_up_are_joined(sizes: tuple[int, ...], inputs: int, rank: int, form: str) -> None:
    if form == "mxfp4" and inputs % 32:
        pytest.skip("blocks of 32")
    one = case(sizes, inputs, rank, form, paired=True)
    assert one.tiles.interleaved == (sizes[0] % 64 == 0)
    whole = sizes[0] % 64 == 0  # LoRA is laid out for kernels only then
    low = one.low if whole else None
    for rows in (1, 7, 8, 9, 17, 65, 131, 200, 333, 1501, 1600):
        for gated in (True, False):
            one.judged(lambda x, g=gated: public.fp4_linear(x, one.tiles, one.bias, low, g), rows, gated, whole)
            one.judged(lambda x, g=gated: public.fp4_linear(x, one.tiles, one.bias, None, g), rows, gated, False)


# Warps, stages, units of a stage: the two that `skinny_plan` begins with, and others.
SKINNY_CUTS = [(8, 2, 8), (12, 3, 4), (8, 4, 2), (16, 2, 4), (4, 3, 1)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sizes", "inputs", "rank", "k_parts"),
    # K must have so many tiles, and its part of x must fit into shared memory.
    [(*shape, parts) for shape in [*ODD, *REAL] for parts in (1, 2, 3) if 64 * parts <= shape[1] <= 2048 * parts],
)
@pytest.mark.parametrize("cut", SKINNY_CUTS)
def test_the_skinny_kernel(
    sizes: tuple[int, ...], inputs: int, rank: int, k_parts: int, cut: tuple[int, int, int]
) -> None:
    one = case(sizes, inputs, rank)
    for rows in (1, 7, 8):
        plan = SkinnyPlan(k_parts, 132 // k_parts, *cut)
        one.judged(lambda x, plan=plan: skinny_linear(x, one.tiles, one.bias, one.low, False, plan), rows)


@pytest.mark.gpu
@pytest.mark.parametrize("k_parts", [1, 2])
@pytest.mark.parametrize("cut", SKINNY_CUTS)
@pytest.mark.parametrize(("sizes", "inputs", "rank"), [*GATE_UP, ((128, 128), 208, 128)])
def test_the_skinny_kernel_joins_gate_and_up(
    sizes: tuple[int, ...], inputs: int, rank: int, k_parts: int, cut: tuple[int, int, int]
) -> None:
    one = case(sizes, inputs, rank, paired=True)
    plan = SkinnyPlan(k_parts, 132 // k_parts, *cut)
    for rows in (1, 7, 8):
        for gated in (True, False):
            one.judged(lambda x, g=gated: skinny_linear(x, one.tiles, one.bias, one.low, g, plan), rows, gated)
            one.judged(lambda x, g=gated: skinny_linear(x, one.tiles, one.bias, None, g, plan), rows, gated, False)


WEIGHTS = ((224, 56), (320, 80), (2368, 56), (3456, 80))  # small, of middle size, large, largest
WGMMA_PLANS = sorted({wgmma_plan(*weight, rows) for weight in WEIGHTS for rows in range(9, 300)}, key=str)


@pytest.mark.gpu
@pytest.mark.parametrize("plan", WGMMA_PLANS, ids=str)
@pytest.mark.parametrize(("sizes", "inputs", "rank"), [shape for shape in [*ODD, *REAL] if shape[1] % 64 == 0])
def test_the_wgmma_kernel(sizes: tuple[int, ...], inputs: int, rank: int, plan: WgmmaPlan) -> None:
    one = case(sizes, inputs, rank)
    for rows in (1, plan.bm - 3, plan.bm, 2 * plan.bm + 1, 700):
        one.judged(lambda x: wgmma_linear(x, one.tiles, one.bias, one.low, False, plan), rows)


@pytest.mark.gpu
@pytest.mark.parametrize("plan", WGMMA_PLANS, ids=str)
@pytest.mark.parametrize(("sizes", "inputs", "rank"), [*GATE_UP, ((128, 128), 320, 128)])
def test_the_wgmma_kernel_joins_gate_and_up(sizes: tuple[int, ...], inputs: int, rank: int, plan: WgmmaPlan) -> None:
    one = case(sizes, inputs, rank, paired=True)
    for rows in (1, plan.bm - 3, 2 * plan.bm + 1, 701):
        for gated in (True, False):
            one.judged(lambda x, g=gated: wgmma_linear(x, one.tiles, one.bias, one.low, g, plan), rows, gated)
            one.judged(lambda x, g=gated: wgmma_linear(x, one.tiles, one.bias, None, g, plan), rows, gated, False)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [16, 64, 128, 256])
def test_three_parts_of_any_rank(rank: int) -> None:
    one = case((512, 128, 64), 576, rank)
    for rows in (3, 12, 200):
        one.judged(lambda x: public.fp4_linear(x, one.tiles, one.bias, one.low), rows)


@pytest.mark.gpu
@pytest.mark.parametrize("plan", WGMMA_PLANS, ids=str)
def test_lora_may_fill_the_ring(plan: WgmmaPlan) -> None:
    one = case((512, 128, 64), 576, 128)
    one.judged(lambda x: wgmma_linear(x, one.tiles, one.bias, one.low, False, plan), plan.bm + 3)


@pytest.mark.gpu
@pytest.mark.parametrize("layer", ["qkv", "o", "gate_up", "down"])
@pytest.mark.parametrize("name", ["qwen2.5-7b", "qwen2.5-32b"])
def test_the_layers_that_are_measured(name: str, layer: str) -> None:
    sizes, inputs = layers(shape_named(name))[layer]
    gated = layer == "gate_up"
    one = case.__wrapped__(sizes, inputs, 32, paired=gated)  # large: not kept
    for rows in (1, 8, 16, 64, 128, 256, 512, 2000):
        one.judged(lambda x: public.fp4_linear(x, one.tiles, one.bias, one.low, gated), rows, gated)


@pytest.mark.parametrize("plan", WGMMA_PLANS, ids=str)
def test_what_a_plan_takes_is_there_on_hopper(plan: WgmmaPlan) -> None:
    threads = 128 * plan.cw + 128
    assert plan.shared <= 227 << 10
    assert 64 * 2 * plan.stages >= 3 * 128, "of LoRA's inner product all columns must fit into the ring"
    if plan.registers:
        launched = 65536 // threads // 8 * 8 * threads  # as many as the compiler's limit leaves to the block
        assert 128 * plan.cw * plan.registers + 128 * plan.others <= launched, "the kernel would wait for ever"


def weights(name: str) -> list[tuple[tuple[int, ...], int, int, int]]:
    """Of a public model's four: N of the parts, K, strips and tiles."""
    found = layers(shape_named(name)).values()
    return [(sizes, inputs, -(-sum(sizes) // 64) * 4, -(-inputs // 64)) for sizes, inputs in found]


@pytest.mark.parametrize("name", sorted(SHAPE_NAMES))
def test_every_plan_of_a_public_model_is_among_those_that_are_tested(name: str) -> None:
    for _, _, strips, k_tiles in weights(name):
        assert {wgmma_plan(strips, k_tiles, rows) for rows in range(9, 1536)} <= set(WGMMA_PLANS)


def test_cuts_that_were_measured_are_those_of_public_models() -> None:
    known = {(strips, k_tiles) for name in SHAPE_NAMES for _, _, strips, k_tiles in weights(name)}
    assert set(MEASURED) <= known


@pytest.mark.parametrize("name", sorted(SHAPE_NAMES))
@pytest.mark.parametrize("rank", [0, 16, 128])
def test_every_public_model_fits_the_skinny_kernel(name: str, rank: int) -> None:
    for sizes, inputs, strips, k_tiles in weights(name):
        tiles = Tiles(torch.empty(strips, k_tiles, 0), torch.empty(0), torch.empty(0), (sum(sizes), inputs))
        low = low_rank_buffers(sizes, 1, rank, 1.0, torch.float32, torch.device("cpu")) if rank else None
        plan = skinny_plan(tiles, low, 132)
        a_strips = len(low.a) // 16 if low is not None else 0
        *_, shared = room(strips, k_tiles, a_strips, plan)
        assert shared <= 227 << 10
        assert plan.k_parts * plan.groups <= 132, "all blocks must be resident at once"
        assert plan.k_parts <= k_tiles
        assert plan.k_parts == MEASURED.get((strips, k_tiles), plan.k_parts), "what was measured is not what is used"


@pytest.mark.parametrize(
    ("sizes", "inputs", "rank", "paired"),
    [pytest.param(*shape, False, marks=[pytest.mark.gpu] if shape in REAL else []) for shape in [*ODD, *REAL]]
    + [((64, 64), 80, 16, True), ((192, 192), 128, 16, True)],
)
def test_dequantized_as_the_format_says(sizes: tuple[int, ...], inputs: int, rank: int, paired: bool) -> None:
    one = case(sizes, inputs, rank, paired=paired)
    found = dequantize_tiles(one.tiles)
    if ON_GPU:
        assert torch.equal(found, one.exact_NK.bfloat16())
    else:  # the interpreter rounds to bf16 by cutting
        assert torch.allclose(found.float(), one.exact_NK, rtol=2**-7, atol=0)


@pytest.mark.parametrize(("sizes", "inputs", "rank"), SHAPES)
def test_lora_is_added(sizes: tuple[int, ...], inputs: int, rank: int) -> None:
    one = case(sizes, inputs, rank)

    def run(x: Tensor) -> Tensor:
        y = F.linear(x, one.exact_NK.to(DTYPE), one.bias)
        add_low_rank(y, x, one.low)
        return y

    for rows in (1, 40):
        one.judged(run, rows)
