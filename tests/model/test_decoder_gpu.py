"""The decoder on a GPU, at the shape of Qwen2.5-0.5B with random weights, judged by transformers and peft.

Low precision is judged by low precision: bf16 here may err at most twice as much, against float32, as bf16 there.
Each test records its figures, which `pytest --junitxml` keeps.
"""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from qerl.kernels.attention import packed_attention, packed_attention_reference
from qerl.kernels.expand import copies, expand
from qerl.model.adapter import NORMS, LoraSettings, add_lora, load_adapter, trained_parameters
from qerl.model.architecture import PROJECTIONS
from qerl.model.decoder import Decoder
from qerl.model.loader import load
from qerl.model.noise import clear_noise, set_noise
from qerl.model.packing import Continued, next_tokens, pack, pack_shared
from qerl.model.random_checkpoint import write_random_checkpoint
from qerl.model.shapes import SHAPES
from qerl.model.trained import refresh
from qerl.quant.checkpoint import Checkpoint
from qerl.quant.layout import dequantize
from tests.model.test_decoder import log_probs, rms, their_log_probs, worst
from tests.model.test_packing import plain_places, sequences
from tests.quant.test_convert import run as quantize

pytestmark = pytest.mark.gpu

random.seed(1)
SEQUENCES = [[random.randrange(150000) for _ in range(length)] for length in (100, 1, 333, 64, 17)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpu") / "model"
    write_random_checkpoint(SHAPES["qwen2.5-0.5b"], path)
    return path


def their_model(path: Path, dtype: torch.dtype) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).cuda().eval()


def judge_bf16(
    ours: list[Tensor], theirs: list[Tensor], exact: list[Tensor], record: Callable[[str, object], None]
) -> None:
    for name, error in (("worst", worst), ("rms", rms)):
        record(f"{name} ours", error(ours, exact))
        record(f"{name} theirs", error(theirs, exact))
        assert error(ours, exact) <= 2 * error(theirs, exact)


def test_bf16_logits(folder: Path, record_property: Callable[[str, object], None]) -> None:
    exact = their_log_probs(their_model(folder, torch.float32), SEQUENCES)
    theirs = their_log_probs(their_model(folder, torch.bfloat16), SEQUENCES)
    ours = log_probs(load(str(folder), base="bf16", device="cuda"), SEQUENCES)
    judge_bf16(ours, theirs, exact, record_property)


def test_float32_logits(folder: Path, record_property: Callable[[str, object], None]) -> None:
    exact = their_log_probs(their_model(folder, torch.float32), SEQUENCES)
    ours = log_probs(load(str(folder), base="bf16", device="cuda", dtype=torch.float32), SEQUENCES)
    record_property("worst", worst(ours, exact))
    assert worst(ours, exact) < 1e-4


@pytest.mark.parametrize("base", ["nvfp4", "mxfp4", "nf4"])
def test_quantized_logits_are_those_of_the_dequantized_weights(
    folder: Path, tmp_path: Path, base: str, record_property: Callable[[str, object], None]
) -> None:
    quantize(folder, tmp_path / "q", base, "rtn", device="cuda")
    models = {dtype: their_model(folder, dtype) for dtype in (torch.float32, torch.bfloat16)}
    with Checkpoint(tmp_path / "q") as checkpoint, torch.no_grad():
        for module in checkpoint.quantized_modules:
            weight = dequantize(checkpoint.read_quantized(module, "cuda"))
            for model in models.values():
                model.get_submodule(module).weight.copy_(weight)
    exact, theirs = (their_log_probs(models[dtype], SEQUENCES) for dtype in (torch.float32, torch.bfloat16))
    ours = load(str(tmp_path / "q"), base=base, device="cuda")
    if base != "nf4":
        weights = {"gate_up": ours.blocks[0].mlp.gate_up.weight, "qkv": ours.blocks[0].attention.qkv.weight}
        assert {name: weight.tiles.interleaved for name, weight in weights.items()} == {"gate_up": True, "qkv": False}
    judge_bf16(log_probs(ours, SEQUENCES), theirs, exact, record_property)


def with_lora(folder: Path, **options: object) -> Decoder:
    model = load(str(folder), device="cuda", **options)
    add_lora(model, LoraSettings(r=8, lora_alpha=16, train_norms=True))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in trained_parameters(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator).cuda() * 0.02)
    refresh(model)
    return model


def gradients(model: Decoder, sequences: list[list[int]], recompute: bool = False) -> dict[str, Tensor]:
    packed = pack(sequences, "cuda")
    places, targets = next_tokens(packed)
    logp, _ = model.logprobs(model(packed, recompute=recompute)[places], targets)
    parameters = trained_parameters(model)
    return dict(zip(parameters, torch.autograd.grad(logp.sum(), list(parameters.values())), strict=True))


def test_gradients_err_at_most_twice_as_much_as_peft_in_bf16(
    folder: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    import peft

    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=list(PROJECTIONS), modules_to_save=list(NORMS))
    made = peft.get_peft_model(their_model(folder, torch.float32), config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator).cuda() * 0.02)
    made.save_pretrained(tmp_path / "adapter")

    def theirs(dtype: torch.dtype) -> Tensor:
        model = peft.PeftModel.from_pretrained(their_model(folder, dtype), tmp_path / "adapter", is_trainable=True)
        for ids in SEQUENCES:
            row = torch.tensor([ids], device="cuda")
            logits = model(input_ids=row).logits[0, :-1].float()
            (torch.log_softmax(logits, -1).gather(1, row[0, 1:, None])).sum().backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        names = [n for i in range(24) for n in sorted(grads) if f"layers.{i}." in n]
        by_kind = [grads[n].float().flatten() for n in names if "lora_B" in n and "q_proj" in n]
        return torch.cat(by_kind + [grads[n].float().flatten() for n in names if "layernorm" in n])

    ours_model = load(str(folder), base="bf16", device="cuda")
    load_adapter(ours_model, tmp_path / "adapter")
    got = gradients(ours_model, SEQUENCES)
    ours = torch.cat(
        [got[f"blocks.{i}.attention.qkv.lora.q_proj.b.master"].flatten() for i in range(24)]
        + [got[f"blocks.{i}.{n}.trained"].flatten() for i in range(24) for n in ("input_norm", "post_attention_norm")]
    )
    exact, low = theirs(torch.float32), theirs(torch.bfloat16)
    errors = {name: float((x - exact).norm() / exact.norm()) for name, x in (("ours", ours), ("theirs", low))}
    for name, error in errors.items():
        record_property(name, error)
    assert errors["ours"] <= 2 * errors["theirs"]


def test_neighbours_change_nothing_in_float32(folder: Path, record_property: Callable[[str, object], None]) -> None:
    """No more than twice as much as two implementations in float32 differ: products of other sizes round elsewhere."""
    plain = log_probs(load(str(folder), base="bf16", device="cuda", dtype=torch.float32), SEQUENCES)
    rounding = worst(plain, their_log_probs(their_model(folder, torch.float32), SEQUENCES))
    record_property("rounding", rounding)
    assert rounding < 2e-5
    model = with_lora(folder, base="bf16", dtype=torch.float32)
    together = log_probs(model, SEQUENCES)
    alone = [log_probs(model, [ids])[0] for ids in SEQUENCES]
    record_property("worst", worst(together, alone))
    assert worst(together, alone) <= 2 * rounding
    backwards = log_probs(model, SEQUENCES[::-1])[::-1]
    assert worst(together, backwards) <= 2 * rounding
    summed: dict[str, Tensor] = {}
    for ids in SEQUENCES:
        if len(ids) > 1:
            for name, gradient in gradients(model, [ids]).items():
                summed[name] = summed.get(name, 0) + gradient
    packed = gradients(model, SEQUENCES)
    record_property("gradients", max(float((packed[n] - g).norm() / g.norm()) for n, g in summed.items()))
    assert all(float((packed[n] - g).norm()) <= 1e-5 * float(g.norm()) for n, g in summed.items())


@pytest.mark.parametrize("base", ["bf16", "nvfp4"])
def test_shared_prompts_err_at_most_twice_as_much_as_their_copies(
    folder: Path, tmp_path: Path, base: str, record_property: Callable[[str, object], None]
) -> None:
    """Log-probs and gradients of bf16, with a prompt once and with one for each completion, against float32."""
    prompts = ((0, (2, 3, 4)), (1, (0, 4)))
    groups = [Continued(SEQUENCES[i], [SEQUENCES[j] for j in others]) for i, others in prompts]

    def outcome(model: Decoder, shared: bool) -> tuple[Tensor, Tensor]:
        packed, places, targets = pack_shared(groups, "cuda")
        if not shared:
            packed = pack(sequences(groups), "cuda")
            places = copies(plain_places(groups), len(packed.ids_T), "cuda")
        logp, _ = model.logprobs(expand(model(packed), places), targets)
        found = torch.autograd.grad(logp.sum(), list(trained_parameters(model).values()))
        return logp.detach(), torch.cat([g.float().flatten() for g in found])

    options = {"base": base, "cache_dir": tmp_path / "cache", "method": "rtn"}
    exact = outcome(with_lora(folder, dtype=torch.float32, **options), shared=False)
    low = with_lora(folder, dtype=torch.bfloat16, **options)
    plain, ours = (outcome(low, shared) for shared in (False, True))
    for name, a, b, c in zip(("log-probs", "gradients"), ours, plain, exact, strict=True):
        errors = [float((x - c).norm() / c.norm()) for x in (a, b)]
        record_property(name, errors)
        assert errors[0] <= 2 * errors[1]


@pytest.mark.parametrize("base", ["bf16", "nvfp4"])
def test_recomputing_keeps_gradients_and_saves_memory(
    folder: Path, tmp_path: Path, base: str, record_property: Callable[[str, object], None]
) -> None:
    model = with_lora(folder, base=base, cache_dir=tmp_path / "cache", method="rtn")
    sequences = [[random.randrange(150000) for _ in range(512)] for _ in range(8)]
    again = gradients(model, sequences)  # flash attention's backward adds in varying order: two runs differ
    peaks, found = {}, {}
    for recompute in (False, True):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found[recompute] = gradients(model, sequences, recompute)
        peaks[recompute] = torch.cuda.max_memory_allocated() - before
        record_property(f"peak MB, recompute {recompute}", peaks[recompute] / 1e6)
    assert peaks[True] < 0.6 * peaks[False]

    def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
        return sum(float((a[name] - b[name]).square().sum()) for name in a) ** 0.5

    record_property("two runs apart", apart(again, found[False]))
    record_property("recomputed apart", apart(found[True], found[False]))
    assert apart(found[True], found[False]) <= 2 * apart(again, found[False])


def test_noise_on_the_gpu_is_that_of_the_cpu(folder: Path, tmp_path: Path) -> None:
    model = load(str(folder), base="nvfp4", device="cuda", method="rtn", cache_dir=tmp_path / "cache")
    clean = log_probs(model, SEQUENCES)
    for sigma in (1e-4, 1e-2):
        set_noise(model, sigma, torch.Generator().manual_seed(0))
        assert worst(log_probs(model, SEQUENCES), clean) == 0
        assert worst(log_probs(model, SEQUENCES, noise=True), clean) > 0
        drawn = torch.randn(896, generator=torch.Generator().manual_seed(0)) * sigma
        assert torch.equal(model.blocks[0].input_norm.noise_D.cpu(), drawn)
    clear_noise(model)
    assert worst(log_probs(model, SEQUENCES, noise=True), clean) == 0


@pytest.mark.parametrize("window", [None, 5, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_varlen_attention_errs_at_most_twice_as_much_as_sdpa(window: int | None, dtype: torch.dtype) -> None:
    lengths = (1, 37, 200, 64, 5)
    total = sum(lengths)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    wide = [torch.randn(total, heads, 64, device="cuda", requires_grad=True) for heads in (14, 2, 2)]
    low = [x.detach().to(dtype).requires_grad_() for x in wide]
    weight = torch.randn(total, 14, 64, device="cuda")

    def outcome(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
        out = function(*inputs)
        return [out.float(), *(g.float() for g in torch.autograd.grad((out.float() * weight).sum(), inputs))]

    reference = [x.detach().float().requires_grad_() for x in low]
    exact = outcome(lambda q, k, v: packed_attention_reference(q, k, v, lengths, window), reference)
    plain = outcome(lambda q, k, v: packed_attention_reference(q, k, v, lengths, window), low)
    ours = outcome(lambda q, k, v: packed_attention(q, k, v, bounds, lengths, window), low)
    for a, b, c in zip(ours, plain, exact, strict=True):
        assert (a - c).abs().max() <= 2 * (b - c).abs().max() + 1e-6
