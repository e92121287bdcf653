"""The decoder, judged by transformers."""

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from qerl.model.adapter import LoraSettings, add_lora, trained_parameters
from qerl.model.decoder import Decoder
from qerl.model.loader import load, load_random
from qerl.model.packing import next_tokens, pack
from qerl.model.trained import refresh
from qerl.quant.checkpoint import Checkpoint
from qerl.quant.layout import dequantize
from tests.model.variants import VARIANTS
from tests.quant.test_convert import run as quantize

random.seed(0)
SEQUENCES = [[random.randrange(256) for _ in range(length)] for length in (9, 1, 23, 2, 60)]


def log_probs(model: Decoder, sequences: list[list[int]] = SEQUENCES, **options: bool) -> list[Tensor]:
    """Log-probabilities of the whole vocabulary at each token, by sequence."""
    with torch.no_grad():
        packed = pack(sequences, model.device)
        logits = model.logits(model(packed, **options))
        assert logits.dtype == torch.float32
        return [*torch.log_softmax(logits, -1).cpu().split(packed.lengths)]


def their_log_probs(model: transformers.PreTrainedModel, sequences: list[list[int]] = SEQUENCES) -> list[Tensor]:
    with torch.no_grad():
        device = next(model.parameters()).device
        return [
            torch.log_softmax(model(torch.tensor([ids], device=device)).logits[0].float(), -1).cpu()
            for ids in sequences
        ]


def worst(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def rms(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return float((torch.cat(ours) - torch.cat(theirs)).square().mean().sqrt())


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_in_float32(make_checkpoint: Callable[..., Path], variant: str) -> None:
    family, changes = VARIANTS[variant]
    folder = make_checkpoint(family, torch.float32, **changes)
    theirs = their_log_probs(transformers.AutoModelForCausalLM.from_pretrained(folder))
    ours = log_probs(load(str(folder), base="bf16", device="cpu", dtype=torch.float32))
    assert worst(ours, theirs) < 1e-4


@pytest.mark.parametrize("variant", VARIANTS)
def test_bf16_errs_at_most_twice_as_much_as_transformers_bf16(
    make_checkpoint: Callable[..., Path], variant: str
) -> None:
    family, changes = VARIANTS[variant]
    folder = make_checkpoint(family, torch.bfloat16, **changes)
    exact = their_log_probs(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    theirs = their_log_probs(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    ours = log_probs(load(str(folder), base="bf16", device="cpu", dtype=torch.bfloat16))
    assert worst(ours, exact) <= 2 * worst(theirs, exact)
    assert rms(ours, exact) <= 2 * rms(theirs, exact)


def test_variants_really_differ(make_checkpoint: Callable[..., Path]) -> None:
    # A sliding window or a rope scaling that is silently ignored would pass for the plain model.
    plain = log_probs(load(str(make_checkpoint("qwen2", torch.float32)), base="bf16", device="cpu"))
    for variant in ("qwen2-yarn", "qwen2-sliding"):
        family, changes = VARIANTS[variant]
        other = log_probs(load(str(make_checkpoint(family, torch.float32, **changes)), base="bf16", device="cpu"))
        assert worst(plain, other) > 1e-3


def dequantized_in_transformers(source: Path, quantized: Path) -> transformers.PreTrainedModel:
    """The plain float32 model in transformers with the quantized folder's weights, dequantized."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with Checkpoint(quantized) as checkpoint, torch.no_grad():
        for module in checkpoint.quantized_modules:
            model.get_submodule(module).weight.copy_(dequantize(checkpoint.read_quantized(module)))
    return model


@pytest.mark.parametrize("base", ["nvfp4", "mxfp4", "nf4"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
def test_a_quantized_checkpoint_gives_the_logits_of_its_dequantized_weights(
    make_checkpoint: Callable[..., Path], tmp_path: Path, base: str, family: str
) -> None:
    source, folder = make_checkpoint(family), tmp_path / "quantized"
    quantize(source, folder, base, "mse", ignore=("*.layers.1.self_attn.k_proj",), double_quant=base == "nf4")
    theirs = their_log_probs(dequantized_in_transformers(source, folder))
    ours = log_probs(load(str(folder), base=base, device="cpu", dtype=torch.float32))
    assert worst(ours, theirs) < 1e-4


@pytest.mark.parametrize("base", ["nvfp4", "mxfp4", "nf4"])
def test_a_16_bit_checkpoint_is_quantized_once_and_cached(
    make_checkpoint: Callable[..., Path], tmp_path: Path, base: str
) -> None:
    source, cache = make_checkpoint("llama"), tmp_path / "cache"
    first = log_probs(load(str(source), base=base, device="cpu", cache_dir=cache))
    kept = [path for path in (cache / "quantized").iterdir() if path.is_dir()]
    assert len(kept) == 1
    stamp = (kept[0] / "config.json").stat().st_mtime_ns
    again = log_probs(load(str(source), base=base, device="cpu", cache_dir=cache))
    assert [path for path in (cache / "quantized").iterdir() if path.is_dir()] == kept
    assert (kept[0] / "config.json").stat().st_mtime_ns == stamp
    assert worst(first, again) == 0
    assert worst(first, their_log_probs(dequantized_in_transformers(source, kept[0]))) < 1e-4


def test_a_cache_that_cannot_be_written_is_refused_with_the_way_around_it(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    with pytest.raises(ValueError, match=r"Can't write .*cache.* qerl quantize .* OUT --format nf4"):
        load(str(make_checkpoint("llama")), base="nf4", device="cpu", cache_dir=tmp_path / "cache")


def losses_and_gradients(
    model: Decoder, sequences: list[list[int]], recompute: bool | int = False
) -> tuple[dict, dict]:
    """Log-probs of each sequence's own tokens, and the gradient of their weighted sum, by sequence and name."""
    parameters = trained_parameters(model)
    packed = pack(sequences, model.device)
    hidden = model(packed, recompute=recompute)
    places, targets = next_tokens(packed)
    logp, _ = model.logprobs(hidden[places], targets)
    parts = logp.split([length - 1 for length in packed.lengths])
    total = sum(
        (part * torch.linspace(1, 2, max(len(part), 1), device=logp.device)[: len(part)]).sum() for part in parts
    )
    gradients = torch.autograd.grad(total, list(parameters.values()))
    keyed = {tuple(ids): part.detach() for ids, part in zip(sequences, parts, strict=True)}
    return keyed, dict(zip(parameters, gradients, strict=True))


def lora_model(folder: Path, base: str = "nvfp4", norms: bool = True, **options: object) -> Decoder:
    """A model with LoRA whose B is not zero, so that every gradient is there."""
    model = load(str(folder), base=base, **options)
    add_lora(model, LoraSettings(r=4, lora_alpha=8, train_norms=norms), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in trained_parameters(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.device) * 0.05)
    refresh(model)
    return model


@pytest.mark.parametrize("variant", ["qwen3", "mistral-sliding"])
def test_neighbours_order_and_lengths_change_nothing(
    make_checkpoint: Callable[..., Path], tmp_path: Path, variant: str
) -> None:
    family, changes = VARIANTS[variant]
    model = lora_model(make_checkpoint(family, **changes), device="cpu", cache_dir=tmp_path / "cache")
    alone: dict = {}
    summed: dict[str, Tensor] = {}
    for ids in SEQUENCES:
        logp, gradients = losses_and_gradients(model, [ids])
        alone |= logp
        for name, gradient in gradients.items():
            summed[name] = summed.get(name, 0) + gradient
    for order in (SEQUENCES, SEQUENCES[::-1], [SEQUENCES[i] for i in (2, 0, 4, 1, 3)]):
        logp, gradients = losses_and_gradients(model, order)
        for ids in SEQUENCES:
            assert torch.allclose(logp[tuple(ids)], alone[tuple(ids)], atol=1e-5, rtol=0)
        for name, gradient in gradients.items():
            assert float((gradient - summed[name]).norm()) <= 1e-5 * float(summed[name].norm()) + 1e-7, name


def test_recomputing_blocks_gives_the_same_gradients(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = lora_model(make_checkpoint("llama"), device="cpu", cache_dir=tmp_path / "cache")
    _, plain = losses_and_gradients(model, SEQUENCES)
    for blocks in (True, 1, 2):
        _, again = losses_and_gradients(model, SEQUENCES, recompute=blocks)
        for name in plain:
            assert torch.equal(plain[name], again[name])


def test_blocks_that_are_recomputed_keep_only_their_input(make_checkpoint: Callable[..., Path]) -> None:
    model = load(str(make_checkpoint("qwen3", num_hidden_layers=4)), base="bf16", device="cpu")
    add_lora(model, LoraSettings(r=4))
    kept = []
    for blocks in (0, 1, 2, 4):
        seen: dict[int, int] = {}

        def keep(tensor: Tensor, seen: dict[int, int] = seen) -> Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(pack([list(range(100))]), recompute=blocks)
        kept.append(sum(seen.values()))
    first, second = kept[0] - kept[1], kept[1] - kept[2]
    assert kept[0] > kept[1] > kept[2] > kept[3] > 0
    assert kept[2] - kept[3] == pytest.approx(2 * second, rel=0.1)
    assert first == pytest.approx(second, rel=0.2)


def test_no_target_crosses_a_segment() -> None:
    packed = pack([[1, 2, 3], [4], [5, 6]])
    places, targets = next_tokens(packed)
    assert places.tolist() == [0, 1, 4]
    assert targets.tolist() == [2, 3, 6]
    assert packed.positions_T.tolist() == [0, 1, 2, 0, 0, 1]
    with pytest.raises(ValueError, match="none may be empty"):
        pack([[1], []])


def test_an_unsupported_architecture_is_refused_with_the_supported_ones(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match=r"type 'gpt2' are not supported.*Qwen3.*Llama.*Mistral"):
        load(str(tmp_path / "gpt2"), base="bf16")


def test_bases_that_do_not_fit_are_refused(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = make_checkpoint("llama")
    with pytest.raises(ValueError, match="no base 'int4'; choose one of bf16"):
        load(str(source), base="int4")
    quantize(source, tmp_path / "q", "mxfp4")
    with pytest.raises(ValueError, match="is quantized as mxfp4: load it with base='mxfp4'"):
        load(str(tmp_path / "q"), base="nvfp4")


def test_a_missing_tensor_is_named(make_checkpoint: Callable[..., Path], edit_config: Callable[..., None]) -> None:
    folder = make_checkpoint("llama")
    edit_config(folder, attention_bias=True)
    with pytest.raises(ValueError, match=r"no tensor model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(str(folder), base="bf16")


def test_weights_that_config_json_does_not_describe_are_refused(
    make_checkpoint: Callable[..., Path], edit_config: Callable[..., None]
) -> None:
    folder = make_checkpoint("llama")
    edit_config(folder, num_key_value_heads=4)
    with pytest.raises(ValueError, match=r"k_proj\.weight has shape \(32, 64\) where \(64, 64\) belongs"):
        load(str(folder), base="bf16")
    folder = make_checkpoint("llama", attention_bias=True)
    edit_config(folder, attention_bias=False)
    with pytest.raises(ValueError, match=r"holds 8 tensors that its architecture lacks, such as .*bias"):
        load(str(folder), base="bf16")
    folder = make_checkpoint("qwen2")
    edit_config(folder, sliding_window=0, use_sliding_window=True, layer_types=["sliding_attention"] * 2)
    with pytest.raises(ValueError, match="sliding window of 0"):
        load(str(folder), base="bf16")


def test_a_checkpoint_that_bitsandbytes_wrote_loads(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = make_checkpoint("llama")
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    made = transformers.AutoModelForCausalLM.from_pretrained(source, quantization_config=settings, device_map="cpu")
    made.save_pretrained(tmp_path / "theirs")
    ours = log_probs(load(str(tmp_path / "theirs"), base="nf4", device="cpu"))
    assert worst(ours, their_log_probs(dequantized_in_transformers(source, tmp_path / "theirs"))) < 1e-4


def test_mistakes_have_messages(make_checkpoint: Callable[..., Path]) -> None:
    folder = str(make_checkpoint())
    with pytest.raises(ValueError, match="Loading rounds by rtn or mse, not 'awq'"):
        load(folder, method="awq")
    with pytest.raises(ValueError, match="no device cuda:9"):
        load(folder, device="cuda:9")
    model = load(folder, base="bf16", device="cpu")
    with pytest.raises(ValueError, match="Token ids must be from 0 to 255"):
        model(pack([[1, 256]]))
    with pytest.raises(ValueError, match="load it anew"):
        model.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"model\(pack\("):
        model([[1, 2]])
    with pytest.raises(ValueError, match="2 hidden states for 1 targets"):
        model.logprobs(model(pack([[1, 2]])), torch.tensor([2]))
    with pytest.raises(ValueError, match="Targets must be token ids from 0 to 255"):
        model.logprobs(model(pack([[1]])), torch.tensor([-100]))
    with pytest.raises(ValueError, match="no compute dtype 'int8'"):
        load(folder, dtype="int8")
    for wrong in ([1, 2], ["hello"], [[1.5]], [[[1, 2]]]):
        with pytest.raises(ValueError, match="each a list of token ids"):
            pack(wrong)


LOADED = """
import os, sys, traceback
import torch, transformers
from qerl.model.loader import load
transformers.AutoModelForCausalLM  # its import is lazy, and dear: once for the three
children = []
for number in range(3):
    if not (child := os.fork()):
        said = os.open(f"{sys.argv[3]}/{number}", os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 2)
        try:
            load(sys.argv[1], device="cpu", cache_dir=sys.argv[2])
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    children.append(child)
print(*(os.waitpid(child, 0)[1] for child in children))
"""


def test_processes_that_load_the_same_model_wait_for_each_other(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", LOADED, str(make_checkpoint("llama")), str(tmp_path / "cache"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    messages = [(tmp_path / str(number)).read_text() for number in range(3)]
    assert done.stdout.split() == ["0", "0", "0"], messages
    assert sum("Quantizing" in message for message in messages) == 1


@pytest.mark.parametrize("base", ["bf16", "nvfp4", "mxfp4", "nf4"])
def test_random_weights_of_a_named_shape_have_a_sane_scale(base: str) -> None:
    model = load_random("toy", base=base, device="cpu")
    weight = model.blocks[0].attention.qkv.weight
    dense = weight.read() if base == "bf16" else weight.dense(torch.float32)
    assert 0.015 < float(dense.std()) < 0.025
    assert bool(torch.isfinite(model.logits(model(pack(SEQUENCES)))).all())
    same = load_random("toy", base=base, device="cpu")
    other = load_random("toy", base=base, device="cpu", seed=1)
    assert worst(log_probs(model), log_probs(same)) == 0
    assert worst(log_probs(model), log_probs(other)) > 0


def test_a_large_dequantized_copy_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from qerl.model import loader

    monkeypatch.setattr(loader, "LARGE_COPY", 1 << 20)
    load_random("toy", device="cpu")
    assert "keep a dequantized copy" in caplog.text
