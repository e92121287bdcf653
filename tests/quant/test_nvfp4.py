import pytest
import torch
from hypothesis import given, settings

from qerl.quant import nf4, nvfp4
from tests.quant.oracles import compressed_tensors, same_bits
from tests.quant.weights import matrices


@settings(max_examples=150, deadline=None)
@given(matrices(block=16))
def test_equals_compressed_tensors_bit_for_bit(weight: torch.Tensor) -> None:
    ours, judge = nvfp4.quantize(weight), compressed_tensors(weight, "nvfp4")
    assert same_bits(ours.packed, judge.packed)
    assert same_bits(ours.scale, judge.scale)
    assert same_bits(ours.global_scale, judge.global_scale)
    assert torch.equal(nvfp4.dequantize(ours, torch.bfloat16), judge.dequantized)


def test_a_shared_global_scale_equals_the_librarys() -> None:
    weight = torch.randn(5, 64)
    amax = torch.tensor(9.5)
    ours = nvfp4.quantize(weight, global_scale_1=nvfp4.global_scale(amax))
    judge = compressed_tensors(weight, "nvfp4", amax)
    assert same_bits(ours.packed, judge.packed)
    assert same_bits(ours.scale, judge.scale)


@settings(max_examples=100, deadline=None)
@given(matrices(block=16))
def test_mse_is_never_worse_than_rtn_in_any_block(weight: torch.Tensor) -> None:
    rtn, mse = nvfp4.quantize(weight), nvfp4.quantize(weight, "mse")
    assert torch.equal(mse.global_scale, rtn.global_scale)

    def block_errors(q: nvfp4.NVFP4) -> torch.Tensor:
        return (nvfp4.dequantize(q).double() - weight.double()).square().view(-1, 16).sum(1)

    assert bool((block_errors(mse) <= block_errors(rtn)).all())


def test_mse_takes_four_over_six_where_it_helps() -> None:
    # Maximum 4 with values on the grid {.5 ... 4}: with 6 as the top they all fall between grid points.
    weight = torch.tensor([[4.0, 3.0, 2.0, 1.5, 1.0, 0.5, 3.0, 2.0] * 2 + [42.0] * 16])
    error = {m: (nvfp4.dequantize(nvfp4.quantize(weight, m)) - weight)[:, :16].square().sum() for m in ("rtn", "mse")}
    assert error["mse"] < 0.2 * error["rtn"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_computed_in_float32(dtype: torch.dtype) -> None:
    weight = torch.randn(7, 48).to(dtype)
    low, wide = nvfp4.quantize(weight), nvfp4.quantize(weight.float())
    assert same_bits(low.packed, wide.packed)
    assert same_bits(low.scale, wide.scale)


def test_the_default_dtype_of_torch_does_not_matter() -> None:
    weight = torch.randn(8, 64)
    expected = [
        nvfp4.dequantize(nvfp4.quantize(weight, "mse")),
        nf4.dequantize(nf4.quantize(weight, double_quant=True)),
    ]
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = [nvfp4.dequantize(nvfp4.quantize(weight, "mse")), nf4.dequantize(nf4.quantize(weight, double_quant=True))]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_parameters_and_odd_views_are_taken() -> None:
    weight = torch.randn(4, 32)
    assert same_bits(nvfp4.quantize(torch.nn.Parameter(weight)).packed, nvfp4.quantize(weight).packed)
    codes = torch.randint(0, 16, (33,), dtype=torch.uint8)
    assert torch.equal(nvfp4.unpack(nvfp4.pack(codes[1:])), codes[1:])
    assert torch.equal(nf4.unpack(nf4.pack(codes[1:])), codes[1:])


def test_a_vector_and_a_stack_keep_their_shape() -> None:
    for shape in ((32,), (2, 3, 32)):
        weight = torch.randn(shape)
        assert nvfp4.dequantize(nvfp4.quantize(weight)).shape == shape


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_are_refused_by_name(bad: float) -> None:
    weight = torch.randn(4, 32)
    weight[2, 5] = bad
    with pytest.raises(ValueError, match=r"model\.q_proj\.weight holds NaN or Inf"):
        nvfp4.quantize(weight, name="model.q_proj.weight")


def test_a_k_that_blocks_do_not_divide_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"model\.q_proj\.weight has 24 inputs.*--ignore 'model\.q_proj'"):
        nvfp4.quantize(torch.randn(4, 24), name="model.q_proj.weight")


def test_unknown_methods_and_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="rtn and mse"):
        nvfp4.quantize(torch.randn(1, 16), "best")
    with pytest.raises(ValueError, match=r"float32, bfloat16 or float16"):
        nvfp4.quantize(torch.ones(1, 16, dtype=torch.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["rtn", "mse"])
def test_gpu_equals_cpu_bit_for_bit(method: str) -> None:
    for scale in (1e-40, 1e-30, 0.02, 1.0, 1e30):
        weight = torch.randn(129, 1024) * scale
        cpu, gpu = nvfp4.quantize(weight, method), nvfp4.quantize(weight.cuda(), method)
        assert same_bits(cpu.packed, gpu.packed.cpu())
        assert same_bits(cpu.scale, gpu.scale.cpu())
        assert torch.equal(nvfp4.dequantize(cpu), nvfp4.dequantize(gpu).cpu())
