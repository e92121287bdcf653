import pytest
import torch
from hypothesis import given, settings

from qerl.quant import mxfp4
from tests.quant.oracles import compressed_tensors, same_bits
from tests.quant.weights import matrices


@settings(max_examples=150, deadline=None)
@given(matrices(block=32))
def test_equals_compressed_tensors_bit_for_bit(weight: torch.Tensor) -> None:
    ours, judge = mxfp4.quantize(weight), compressed_tensors(weight, "mxfp4")
    assert same_bits(ours.packed, judge.packed)
    assert same_bits(ours.scale, judge.scale)
    assert torch.equal(mxfp4.dequantize(ours, torch.bfloat16), judge.dequantized)


@settings(max_examples=100, deadline=None)
@given(matrices(block=32))
def test_mse_is_never_worse_than_rtn_in_any_block(weight: torch.Tensor) -> None:
    def block_errors(method: str) -> torch.Tensor:
        back = mxfp4.dequantize(mxfp4.quantize(weight, method))
        return (back.double() - weight.double()).square().view(-1, 32).sum(1)

    assert bool((block_errors("mse") <= block_errors("rtn")).all())


def test_the_exponent_rises_at_a_mantissa_of_one_and_three_quarters() -> None:
    below = float(torch.nextafter(torch.tensor(1.75), torch.tensor(0.0)))
    for value, exponent in ((1.0, -2), (below, -2), (1.75, -1), (2.0, -1), (0.0, -127)):
        weight = torch.zeros(1, 32)
        weight[0, 3] = value
        assert mxfp4.quantize(weight).scale.item() - 127 == exponent


def test_the_largest_float_stays_finite() -> None:
    weight = torch.full((1, 32), torch.finfo(torch.float32).max)
    assert bool(torch.isfinite(mxfp4.dequantize(mxfp4.quantize(weight))).all())


def test_refusals_name_the_tensor() -> None:
    with pytest.raises(ValueError, match=r"up\.weight holds NaN or Inf"):
        mxfp4.quantize(torch.full((1, 32), torch.nan), name="up.weight")
    with pytest.raises(ValueError, match=r"up\.weight has 48 inputs"):
        mxfp4.quantize(torch.randn(1, 48), name="up.weight")


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["rtn", "mse"])
def test_gpu_equals_cpu_bit_for_bit(method: str) -> None:
    for scale in (1e-40, 1e-30, 0.02, 1.0, 1e30):
        weight = torch.randn(129, 1024) * scale
        cpu, gpu = mxfp4.quantize(weight, method), mxfp4.quantize(weight.cuda(), method)
        assert same_bits(cpu.packed, gpu.packed.cpu())
        assert same_bits(cpu.scale, gpu.scale.cpu())
        assert torch.equal(mxfp4.dequantize(cpu), mxfp4.dequantize(gpu).cpu())
