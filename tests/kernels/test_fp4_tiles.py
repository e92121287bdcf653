import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl.kernels.fp4_tiles import decode_scales, random_tiles, tile, untile
from qerl.quant import e2m1, mxfp4, nvfp4
from tests.kernels.devices import seeded


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 150), blocks=st.integers(1, 20), seed=st.integers(0, 1000))
def test_nvfp4_comes_back_as_it_was(rows: int, blocks: int, seed: int) -> None:
    weight = torch.randn(rows, 16 * blocks, generator=seeded(seed))
    weight *= torch.exp(3 * torch.randn(rows, 1, generator=seeded(seed)))  # scales of every size, subnormals too
    q = nvfp4.quantize(weight)
    tiles = tile([q, q])
    assert tiles is not None
    codes, scales = untile(tiles)
    assert torch.equal(codes, e2m1.unpack(q.packed).repeat(2, 1))
    assert torch.equal(decode_scales(scales), q.scale.float().repeat(2, 1))
    assert torch.equal(tiles.divisor_N[: 2 * rows], q.global_scale.expand(2 * rows))


def test_mxfp4_means_the_same() -> None:
    weight = torch.randn(70, 160, generator=seeded()) * torch.exp(4 * torch.randn(70, 1, generator=seeded()))
    weight[3] = 0
    q = mxfp4.quantize(weight)
    tiles = tile([q])
    assert tiles is not None
    codes, scales = untile(tiles)
    values = e2m1.decode(codes).view(70, -1, 16) * (decode_scales(scales) / tiles.divisor_N[:70, None])[..., None]
    assert torch.equal(values.view(70, 160), mxfp4.dequantize(q))


def test_scales_too_far_apart_are_left_to_others() -> None:
    weight = torch.ones(16, 32)
    weight[0] *= 2.0**-40
    assert tile([mxfp4.quantize(weight)]) is None


def test_a_negative_scale_is_refused() -> None:
    q = nvfp4.quantize(torch.randn(16, 16, generator=seeded()))
    negative = (-q.scale.to(torch.float32)).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="from 0 up"):
        tile([nvfp4.NVFP4(q.packed, negative, q.global_scale)])


def test_random_tiles_are_uniform_codes_of_a_deviation() -> None:
    tiles = random_tiles(128, 192, 0.02, torch.Generator().manual_seed(0))
    codes, scales = untile(tiles)
    assert codes.shape == (128, 192)
    assert torch.bincount(codes.flatten().int(), minlength=16).min() > 128 * 192 / 16 * 0.8
    values = e2m1.decode(codes) * decode_scales(scales).repeat_interleave(16, 1) / tiles.divisor_N[:, None]
    assert float(values.std()) == pytest.approx(0.02, rel=0.05)
