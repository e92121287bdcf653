import bitsandbytes.functional as bnb
import pytest
import torch
from hypothesis import given, settings

from qerl.quant import nf4
from tests.quant.oracles import same_bits
from tests.quant.weights import matrices


@settings(max_examples=150, deadline=None)
@given(matrices(block=64))
def test_equals_bitsandbytes_bit_for_bit(weight: torch.Tensor) -> None:
    ours = nf4.quantize(weight)
    packed, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    assert same_bits(ours.packed, packed.flatten())
    assert same_bits(ours.absmax, state.absmax)
    assert torch.equal(nf4.dequantize(ours), bnb.dequantize_4bit(packed, state))


@settings(max_examples=100, deadline=None)
@given(matrices(block=64, most_rows=40, most_blocks=20))
def test_double_quantization_equals_bitsandbytes_bit_for_bit(weight: torch.Tensor) -> None:
    weight = weight.clamp(-1e30, 1e30)
    ours = nf4.quantize(weight, double_quant=True)
    packed, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    assert isinstance(ours.absmax, nf4.Nested)
    assert same_bits(ours.packed, packed.flatten())
    assert same_bits(ours.absmax.code, state.absmax)
    assert same_bits(ours.absmax.absmax, state.state2.absmax)
    assert same_bits(ours.absmax.table, state.state2.code)
    assert torch.equal(ours.absmax.offset, state.offset)
    assert torch.equal(nf4.dequantize(ours), bnb.dequantize_4bit(packed, state))


@pytest.mark.parametrize("shape", [(5, 13), (1, 63), (3, 65), (1, 1), (70,), (2, 3, 21)])
@pytest.mark.parametrize("double_quant", [False, True])
def test_odd_sizes_equal_bitsandbytes(shape: tuple[int, ...], double_quant: bool) -> None:
    weight = torch.randn(shape)
    ours = nf4.quantize(weight, double_quant=double_quant)
    packed, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=double_quant)
    assert same_bits(ours.packed, packed.flatten())
    if weight.dim() == 2:
        assert torch.equal(nf4.dequantize(ours), bnb.dequantize_4bit(packed, state))
    assert nf4.dequantize(ours).shape == shape


@settings(max_examples=100, deadline=None)
@given(matrices(block=64))
def test_mse_is_never_worse_than_rtn_in_any_block(weight: torch.Tensor) -> None:
    def block_errors(method: str) -> torch.Tensor:
        back = nf4.dequantize(nf4.quantize(weight, method))
        return (back.double() - weight.double()).square().view(-1, 64).sum(1)

    assert bool((block_errors("mse") <= block_errors("rtn")).all())


def test_packing_puts_the_first_code_high_and_is_invertible() -> None:
    codes = torch.randint(0, 16, (11,), dtype=torch.uint8)
    packed = nf4.pack(codes)
    assert torch.equal(packed >> 4, torch.cat((codes[::2],)))
    assert torch.equal(nf4.unpack(packed)[:11], codes)


def test_refusals_name_the_tensor() -> None:
    with pytest.raises(ValueError, match=r"up\.weight holds NaN or Inf"):
        nf4.quantize(torch.full((1, 70), torch.inf), name="up.weight")
    with pytest.raises(ValueError, match="too large for double quantization"):
        nf4.quantize(torch.full((64, 64), 3e38), double_quant=True)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["rtn", "mse"])
def test_gpu_equals_cpu_bit_for_bit(method: str) -> None:
    for scale in (1e-30, 0.02, 1.0, 1e30):
        weight = torch.randn(129, 1024) * scale
        cpu, gpu = nf4.quantize(weight, method), nf4.quantize(weight.cuda(), method)
        assert same_bits(cpu.packed, gpu.packed.cpu())
        assert same_bits(cpu.absmax, gpu.absmax.cpu())
        assert torch.equal(nf4.dequantize(cpu), nf4.dequantize(gpu).cpu())
