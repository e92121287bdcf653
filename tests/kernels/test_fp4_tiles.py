import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl.kernels.fp4_tiles import decode_scales, tile, untile
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
    codes, scales, divisor = untile(tiles)
    assert torch.equal(codes, e2m1.unpack(q.packed).repeat(2, 1))
    assert torch.equal(decode_scales(scales), q.scale.float().repeat(2, 1))
    assert torch.equal(divisor, q.global_scale.expand(2 * rows))


def two(rows: int, inputs: int) -> list[nvfp4.NVFP4]:
    """Gate and up, whose scales differ."""
    return [nvfp4.quantize(torch.randn(rows, inputs, generator=seeded(i)) * (i + 1)) for i in range(2)]


@pytest.mark.parametrize(("rows", "blocks"), [(64, 1), (64, 9), (192, 4)])
def test_gate_and_up_come_back_as_they_were(rows: int, blocks: int) -> None:
    parts = two(rows, 16 * blocks)
    tiles, plain = tile(parts, paired=True), tile(parts)
    assert tiles is not None
    assert plain is not None
    assert tiles.interleaved
    assert not torch.equal(tiles.words, plain.words)
    codes, scales, divisor = untile(tiles)
    assert torch.equal(codes, torch.cat([e2m1.unpack(q.packed) for q in parts]))
    assert torch.equal(decode_scales(scales), torch.cat([q.scale.float() for q in parts]))
    assert torch.equal(divisor, torch.cat([q.global_scale.expand(rows) for q in parts]))


def test_a_strip_has_eight_rows_of_gate_and_the_same_of_up() -> None:
    gate, up = two(64, 64)
    whole = tile([gate, up], paired=True)
    assert whole is not None
    for strip in range(8):
        eight = [
            nvfp4.NVFP4(q.packed[8 * strip : 8 * strip + 8], q.scale[8 * strip : 8 * strip + 8], q.global_scale)
            for q in (gate, up)
        ]
        one = tile(eight)
        assert one is not None
        assert torch.equal(whole.words[strip], one.words[0])
        assert torch.equal(whole.scales[strip], one.scales[0])
        assert torch.equal(whole.divisor_N[16 * strip : 16 * strip + 16], one.divisor_N[:16])


def test_halves_of_odd_sizes_stay_in_their_order() -> None:
    parts = two(32, 64)
    tiles, plain = tile(parts, paired=True), tile(parts)
    assert tiles is not None
    assert plain is not None
    assert not tiles.interleaved
    assert torch.equal(tiles.words, plain.words)


def test_mxfp4_means_the_same() -> None:
    weight = torch.randn(70, 160, generator=seeded()) * torch.exp(4 * torch.randn(70, 1, generator=seeded()))
    weight[3] = 0
    q = mxfp4.quantize(weight)
    tiles = tile([q])
    assert tiles is not None
    codes, scales, divisor = untile(tiles)
    values = e2m1.decode(codes).view(70, -1, 16) * (decode_scales(scales) / divisor[:, None])[..., None]
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
