"""The rival of the benches, judged by our NF4 reference, and on the CPU through every bench that takes it."""

import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qerl.bench import decode, step, training
from qerl.bench.qlora import (
    BITSANDBYTES,
    BitsandbytesProjection,
    fewest_recomputed,
    hold_bitsandbytes,
    ratios,
    require,
    rivals_first,
)
from qerl.engine.engine import Engine
from qerl.kernels.swiglu import swiglu_reference
from qerl.model.adapter import add_lora, trained_parameters
from qerl.model.decoder import Decoder
from qerl.model.layers import DenseWeight, Lora, LoraSettings, Mode, Projection
from qerl.model.loader import load_random
from qerl.model.packing import next_tokens, pack
from qerl.model.shapes import shape_named
from qerl.quant import nf4
from qerl.records import Request, Sampling
from qerl.rl import footprint

CPU, MODE = torch.device("cpu"), Mode()
IDS = [list(range(3, 40)), list(range(90, 101))]


def quiet(message: str) -> None:
    pass


def with_moved_lora(model: Decoder) -> Decoder:
    """LoRA's B is zero at first, and would hide what it does."""
    add_lora(model, LoraSettings(r=8, lora_alpha=16))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in trained_parameters(model).items():
        if ".b." in name:
            parameter.data.normal_(0, 0.02, generator=generator)
    return model


@pytest.fixture
def pair() -> tuple[Decoder, Decoder]:
    """The rival, and a 16-bit model of ours with the weights that it should have, by our NF4."""
    theirs, ours = (load_random("toy", "bf16", "cpu", seed=3) for _ in range(2))
    hold_bitsandbytes(theirs)
    for module in ours.modules():
        if isinstance(module, Projection):
            assert isinstance(module.weight, DenseWeight)
            parts = [nf4.quantize(part, double_quant=True) for part in module.weight.read().split(list(module.sizes))]
            module.weight = DenseWeight(torch.cat([nf4.dequantize(part) for part in parts]))
    return with_moved_lora(theirs), with_moved_lora(ours)


def test_a_projection_is_our_reference_of_its_quantized_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes, inputs = (128, 64, 64), 192
    weight, bias = (torch.randn(*shape, generator=generator) for shape in ((256, inputs), (256,)))
    found = BitsandbytesProjection(Projection(("q", "k", "v"), sizes, DenseWeight(weight), bias), torch.float32)
    for part, n in zip(("q", "k", "v"), sizes, strict=True):
        a, b = torch.randn(4, inputs, generator=generator), torch.randn(n, 4, generator=generator)
        found.lora[part] = Lora(a, b, 2.0, torch.float32)
    parts = [nf4.dequantize(nf4.quantize(part, double_quant=True)) for part in weight.split(list(sizes))]
    low = [2.0 * lora.b.master @ lora.a.master for lora in found.lora.values()]
    x = torch.randn(2, 5, inputs, generator=generator)
    plain = F.linear(x, torch.cat(parts), bias)
    torch.testing.assert_close(found(x, Mode(adapter=False)), plain)
    torch.testing.assert_close(found(x, MODE), plain + F.linear(x, torch.cat(low)), rtol=1e-4, atol=1e-4)
    wide = torch.randn(5, 2 * inputs, generator=generator)
    assert torch.equal(found(wide, MODE, gated=True), found(swiglu_reference(wide), MODE))


def test_in_bf16_it_is_as_near_to_float32_as_pytorch() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(128, 256, generator=generator).bfloat16()
    found = BitsandbytesProjection(Projection(("o",), (128,), DenseWeight(weight), None), torch.bfloat16)
    a, b = torch.randn(8, 256, generator=generator), torch.randn(128, 8, generator=generator)
    found.lora["o"] = Lora(a, b, 0.5, torch.bfloat16)
    x, held = torch.randn(40, 256, generator=generator).bfloat16(), nf4.quantize(weight, double_quant=True)
    a, b = a.bfloat16(), b.bfloat16()
    plain = F.linear(x, nf4.dequantize(held, torch.bfloat16)) + F.linear(F.linear(x, a), b) * 0.5
    exact = F.linear(x.float(), nf4.dequantize(held)) + F.linear(F.linear(x.float(), a.float()), b.float()) * 0.5
    y = found(x, MODE)
    assert y.dtype == torch.bfloat16
    assert (y.float() - exact).abs().max() <= 2 * (plain.float() - exact).abs().max()


@pytest.mark.parametrize("recompute", [False, True])
def test_log_probs_and_gradients_of_lora(pair: tuple[Decoder, Decoder], recompute: bool) -> None:
    packed = pack(IDS)
    places, targets = next_tokens(packed)
    found = []
    for model in pair:
        logp, _ = model.logprobs(model(packed, recompute=recompute)[places], targets)
        logp.sum().backward()
        found.append((logp.detach(), {name: p.grad for name, p in trained_parameters(model).items()}))
    (theirs, their_grads), (ours, our_grads) = found
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
    assert their_grads.keys() == our_grads.keys()
    assert len(their_grads) == 2 * 7 * pair[0].arch.layers
    for name, grad in their_grads.items():
        assert grad.abs().max() > 0
        torch.testing.assert_close(grad, our_grads[name], rtol=1e-3, atol=1e-4 * float(our_grads[name].abs().max()))


def test_the_engine_draws_the_same_tokens(pair: tuple[Decoder, Decoder]) -> None:
    drawn = []
    for model in pair:
        done = Engine(model, 16, 16, max_running=2).generate(
            [Request(i, tuple(ids)) for i, ids in enumerate(IDS)], Sampling(max_tokens=12, temperature=0)
        )
        drawn.append([list(completion.token_ids) for completion in done])
    assert drawn[0] == drawn[1]


def test_all_projections_are_replaced_and_their_tensors_are_seen() -> None:
    model = decode.random_model("toy", BITSANDBYTES, 8, CPU)
    held = [module for module in model.modules() if isinstance(module, Projection)]
    assert len(held) == 4 * model.arch.layers
    assert all(isinstance(module, BitsandbytesProjection) for module in held)
    names = [name for name, _ in model.tensors()]
    assert sum(".weight.packed." in name for name in names) == 7 * model.arch.layers
    weights = sum(sum(m.sizes) * m.weight.states[0].shape[1] for m in held)
    stored = sum(t.nbytes for name, t in model.tensors() if ".weight.packed." in name or ".weight.scales." in name)
    assert 8 * stored / weights == pytest.approx(4.127, abs=0.02)  # 4 + 8/64 + 32/(64 * 256) bits
    assert sum(parameter.requires_grad for parameter in model.parameters()) == len(list(model.parameters()))


def test_a_walk_that_finds_nothing_raises() -> None:
    model = load_random("toy", "bf16", "cpu")
    model.blocks = nn.ModuleList()
    with pytest.raises(ValueError, match="no projection"):
        hold_bitsandbytes(model)


def test_what_a_bench_can_not_have_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no base 'nf3'; benches know bf16, nvfp4, mxfp4, nf4, bitsandbytes"):
        require(["bf16", "nf3"])
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    require(["bf16", "nf4"])
    said: list[str] = []
    for measure, job in (
        (step.measure, step.Steps(["toy"], ["bf16", BITSANDBYTES], [2], 2, 2, 6, 5, 4, "auto", 64, 2, device="cpu")),
        (training.measure, training.Passes(["toy"], ["bf16", BITSANDBYTES], [48], 20, 4, "2", 1, "cpu")),
        (decode.measure, decode.Table(("toy",), ("bf16", BITSANDBYTES), (8,), (1,), (4,), 8, 8, "cpu")),
    ):
        with pytest.raises(ValueError, match="pip install bitsandbytes"):
            next(measure(job, said.append))
    assert said == []


def test_rivals_come_first_and_have_their_ratios() -> None:
    assert rivals_first(["nvfp4", BITSANDBYTES, "nf4", "bf16"]) == ["bf16", BITSANDBYTES, "nvfp4", "nf4"]
    done: dict[tuple[str, int], float] = {}
    assert ratios(done, BITSANDBYTES, 8, 6.0) == {"x_bf16": None, "x_bitsandbytes": 1.0}
    assert ratios(done, "nvfp4", 8, 2.0) == {"x_bf16": None, "x_bitsandbytes": 3.0}
    assert ratios(done, "nvfp4", 32, 2.0) == {"x_bf16": None, "x_bitsandbytes": None}


def test_blocks_are_recomputed_for_what_the_rival_keeps_more() -> None:
    shape, load, gpu = shape_named("qwen2.5-7b"), training.work(BITSANDBYTES, 32, 32768, 0, 2), 141 * 10**9
    planned = fewest_recomputed("nf4", shape, load, gpu)
    count = fewest_recomputed(BITSANDBYTES, shape, load, gpu)
    assert 0 == planned < count < shape.layers

    def fits(count: int) -> bool:
        more = (shape.layers - count) * 32768 * shape.intermediate * 2
        return footprint.fewest_recomputed(shape, load, gpu - more) <= count

    assert fits(count)
    assert not fits(count - 1)
    assert fewest_recomputed(BITSANDBYTES, shape, load, 10**9) == shape.layers


def test_whole_steps_go_through_the_trainer() -> None:
    steps = step.Steps(["toy"], ["nvfp4", BITSANDBYTES], [2], 2, 2, 6, 5, 4, "auto", 64, 2, device="cpu")
    theirs, ours = step.measure(steps, quiet)
    assert (theirs["base"], theirs["x_bitsandbytes"], theirs["decode"]) == (BITSANDBYTES, 1, "eager")
    assert ours["x_bitsandbytes"] == pytest.approx(theirs["step_s"] / ours["step_s"], rel=0.01)
    assert theirs["plan_gb"] is theirs["plan_off"] is theirs["plan_device_gb"] is None
    assert theirs["rollout_s"] > 0 < theirs["backward_s"]


def test_training_passes() -> None:
    (row,) = training.measure(training.Passes(["toy"], [BITSANDBYTES], [48], 20, 4, "2", 1, "cpu"), quiet)
    assert (row["recomputed"], row["x_bitsandbytes"], row["plan_gb"]) == (2, 1, None)


def test_decoding_says_how_it_was_done() -> None:
    said: list[str] = []
    table = decode.Table(("toy",), (BITSANDBYTES,), (0, 8), (2,), (4,), prompt=8, run_up_to=8, device="cpu")
    rows = list(decode.measure(table, said.append))
    assert [row["rank"] for row in rows] == [0, 8]
    assert all(row["tokens_per_s"] > 0 and row["floor_ms"] > 0 for row in rows)
    assert said.count("decode steps are eager") == 2


@pytest.mark.gpu
def test_decode_steps_are_captured_on_a_gpu(record_property: Callable[[str, object], None]) -> None:
    """For so few rows that its fused kernel serves, and for so many that it dequantizes."""
    for rows in (2, 8, 96):
        tokens = []
        for base in (BITSANDBYTES, "nf4"):
            model = decode.random_model("qwen2.5-0.5b", base, 32, torch.device("cuda"))
            engine = Engine(model, 1024, 16, max_running=rows)
            requests = [Request(i, tuple(range(i, i + 64))) for i in range(rows)]
            done = engine.generate(requests, Sampling(max_tokens=24, temperature=0))
            assert decode.decoded(engine) == "captured graphs"
            again = engine.generate(requests, Sampling(max_tokens=24, temperature=0))
            assert [c.token_ids for c in again] == [c.token_ids for c in done]
            tokens.append([c.token_ids[0] for c in done])
        same = sum(a == b for a, b in zip(*tokens, strict=True)) / rows
        record_property(f"{rows} rows: first tokens as by our NF4", same)
        assert same > 0.5  # both are the same weights but for a block in 4000


@pytest.mark.gpu
def test_whole_steps_on_a_gpu() -> None:
    job = step.Steps(["qwen2.5-0.5b"], [BITSANDBYTES], [8], 4, 4, 64, 64, 32, "2", 1024, 4)
    (row,) = step.measure(job, print)
    assert row["decode"] == "captured graphs"
    assert row["allocated_gb_step3"] == row["allocated_gb_last"]
