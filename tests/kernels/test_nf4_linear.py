"""NF4 linears against float32: in bf16 on a GPU, else in Triton's interpreter and float32; bitsandbytes judges both."""

from collections.abc import Callable
from dataclasses import replace

import bitsandbytes.functional
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qerl.kernels.gpu.nf4_linear import dequantize_nf4, nf4_linear, tiled_nf4_linear
from qerl.kernels.gpu.tiled import Plan
from qerl.kernels.low_rank import low_rank_buffers, low_rank_reference
from qerl.kernels.nf4_tiles import Nf4Tiles, tile_nf4, untile_nf4
from qerl.quant import nf4
from tests.kernels.devices import DEVICE, judge, normal

ON_GPU = DEVICE == "cuda"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
# N of the parts, K: odd ones, and those of Qwen2.5 0.5B and 7B.
ODD = [((60,), 64), ((128, 64, 64), 192), ((200,), 320), ((128, 128), 256)]
REAL = [((896, 128, 128), 896), ((4864, 4864), 896), ((896,), 4864), ((3584, 512, 512), 3584), ((3584,), 18944)]
SHAPES = [*ODD, *(pytest.param(*shape, marks=pytest.mark.gpu) for shape in REAL)]
PLANS = [Plan(*cut) for cut in ((1, 1, 16, 4, 2, 3), (1, 1, 32, 4, 3, 0), (2, 2, 16, 4, 4, 3), (2, 1, 64, 8, 3, 2))]


def case(sizes: tuple[int, ...], inputs: int, nested: bool = False) -> tuple[Nf4Tiles, Tensor]:
    weights = [normal(n, inputs, seed=i) * inputs**-0.5 * (i + 1) for i, n in enumerate(sizes)]
    parts = [nf4.quantize(weight, double_quant=nested) for weight in weights]
    tiles = tile_nf4(parts)
    assert tiles is not None
    return tiles, torch.cat([nf4.dequantize(part) for part in parts])


def judged(run: Callable[[Tensor], Tensor], exact_NK: Tensor, bias: Tensor, rows: int) -> None:
    x = normal(rows, exact_NK.shape[1], seed=rows, dtype=DTYPE)
    ours = run(x)
    exact = x.float() @ exact_NK.t() + bias.float()
    judge(ours, F.linear(x, exact_NK.to(DTYPE), bias), exact)
    if ON_GPU:
        assert torch.equal(run(x), ours), "the same call must give the same bits"


@pytest.mark.parametrize(("sizes", "inputs"), SHAPES)
@pytest.mark.parametrize("nested", [False, True])
def test_tiling_is_exact_and_invertible(sizes: tuple[int, ...], inputs: int, nested: bool) -> None:
    weights = [normal(n, inputs, seed=i) for i, n in enumerate(sizes)]
    parts = [nf4.quantize(weight, double_quant=nested) for weight in weights]
    codes, absmax = untile_nf4(tile_nf4(parts))
    assert torch.equal(codes.flatten(), torch.cat([nf4.unpack(part.packed) for part in parts]))
    flat = [part.absmax.dequantize() if nested else part.absmax for part in parts]
    assert torch.equal(absmax.flatten(), torch.cat(flat))


def test_blocks_that_straddle_rows_are_left_to_the_reference() -> None:
    assert tile_nf4([nf4.quantize(normal(8, 96))]) is None


def test_longer_blocks_are_repeated() -> None:
    long = replace(nf4.quantize(normal(16, 128)), absmax=torch.arange(1.0, 17, device=DEVICE), block=128)
    _, absmax = untile_nf4(tile_nf4([long]))
    assert torch.equal(absmax, torch.arange(1.0, 17, device=DEVICE)[:, None].expand(16, 2))


@pytest.mark.parametrize(("sizes", "inputs"), SHAPES)
def test_dequantized_as_bitsandbytes_does(sizes: tuple[int, ...], inputs: int) -> None:
    tiles, exact = case(sizes, inputs)
    found = dequantize_nf4(tiles)
    place = torch.full_like(found, torch.nan)
    assert dequantize_nf4(tiles, place) is place
    assert torch.equal(place, found)
    theirs = []
    for i, n in enumerate(sizes):
        weight = normal(n, inputs, seed=i) * inputs**-0.5 * (i + 1)
        packed, state = bitsandbytes.functional.quantize_nf4(weight.bfloat16(), blocksize=64)
        ours = tile_nf4([nf4.NF4(packed.flatten(), state.absmax, (n, inputs))])
        theirs.append((dequantize_nf4(ours), bitsandbytes.functional.dequantize_nf4(packed, state)))
    if ON_GPU:
        assert torch.equal(found, exact.bfloat16())
        assert all(torch.equal(a, b) for a, b in theirs)
    else:  # the interpreter rounds to bf16 by cutting
        assert torch.allclose(found.float(), exact, rtol=2**-7, atol=0)
        assert all(torch.allclose(a.float(), b.float(), rtol=2**-6, atol=0) for a, b in theirs)


@pytest.mark.parametrize(("sizes", "inputs"), SHAPES)
@pytest.mark.parametrize("plan", PLANS)
def test_the_kernel(sizes: tuple[int, ...], inputs: int, plan: Plan) -> None:
    if -(-sum(sizes) // 64) % plan.nr or inputs // 64 % plan.kr:
        plan = replace(plan, nr=1, kr=1)
    tiles, exact = case(sizes, inputs, nested=len(sizes) == 2)
    bias = normal(sum(sizes), seed=7, dtype=DTYPE)
    for rows in (5,) if not ON_GPU else (1, 8, 33, 100, 300):
        judged(lambda x: tiled_nf4_linear(x, tiles, bias, plan), exact, bias, rows)


@pytest.mark.parametrize(("sizes", "inputs"), SHAPES)
def test_what_is_chosen_by_itself_and_lora(sizes: tuple[int, ...], inputs: int) -> None:
    tiles, exact = case(sizes, inputs)
    low = low_rank_buffers(sizes, inputs, 16, 2.0, DTYPE, exact.device)
    low.a.copy_(normal(*low.a.shape, seed=9) * inputs**-0.5)
    low.b.copy_(normal(*low.b.shape, seed=8) * 0.1)
    wide = replace(low, a=low.a.float(), b=low.b.float())
    for rows in (17,) if not ON_GPU else (1, 3, 8, 16, 17, 64, 65, 128, 200, 300, 511, 512, 1500):
        x = normal(rows, inputs, seed=rows, dtype=DTYPE)
        y = x.float() @ exact.t() + low_rank_reference(x.float(), wide)
        plain = F.linear(x, exact.to(DTYPE)) + low_rank_reference(x, low)
        judge(nf4_linear(x, tiles, None, low), plain, y)
        if len(sizes) == 2:
            gated = [F.silu(value.chunk(2, -1)[0]) * value.chunk(2, -1)[1] for value in (plain, y)]
            judge(nf4_linear(x, tiles, None, low, paired=True), *gated)
