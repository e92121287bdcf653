"""An export is the model that was trained, by the word of transformers and PEFT."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import peft
import pytest
import safetensors.torch
import torch
import transformers

import qerl
from qerl.engine.engine import Engine
from qerl.export.forms import REPORT, Watch, export_adapter, export_for_vllm, export_merged, export_nvfp4
from qerl.export.trained import find_trained
from qerl.model.adapter import LoraSettings, add_lora, load_adapter, save_adapter
from qerl.model.loader import load, weights_folder
from qerl.quant.checkpoint import Checkpoint, resolve
from qerl.quant.layout import dequantize
from qerl.records import Request, Sampling
from qerl.tiny import tiny_model_folder
from tests.conftest import tiny_model
from tests.rl.test_trainer import few_threads, tiny_job  # noqa: F401 (a fixture)

PROMPTS = [[5, 9, 14, 3], [7, 2, 30], [21, 8, 8, 40, 11]]
NEW = 24


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """4-bit forms are kept for all tests here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


def trained_adapter(folder: Path, model: str, base: str, norms: bool = True, **settings: object) -> Path:
    """An adapter as training could leave it: B, and the norms' gains, moved."""
    decoder = load(model, base, "cpu")
    add_lora(decoder, LoraSettings(r=4, lora_alpha=8, train_norms=norms, **settings))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith(".b.master"):
                parameter.normal_(0, 0.05, generator=generator)
            elif "norm" in name:
                parameter.mul_(1 + 0.05 * torch.randn(parameter.shape, generator=generator))
    save_adapter(decoder, folder)
    return folder


def generated_by_us(model: str, base: str, adapter: Path | None) -> list[list[int]]:
    decoder = load(model, base, "cpu", "float32")
    if adapter is not None:
        load_adapter(decoder, adapter)
    requests = [Request(i, tuple(prompt), 1) for i, prompt in enumerate(PROMPTS)]
    done = Engine(decoder, 32, 16).generate(requests, Sampling(max_tokens=NEW, temperature=0.0))
    return [list(each.token_ids) for each in sorted(done, key=lambda each: each.request)]


def generated_by_transformers(model: torch.nn.Module) -> list[list[int]]:
    model.eval()
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(  # type: ignore[operator]
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


CASES = {
    "tied, biased": ("tiny", "nvfp4"),
    "untied": ("llama", "nvfp4"),
    "norms on heads": ("qwen3", "mxfp4"),
    "16-bit base": ("mistral", "bf16"),
}


@pytest.mark.parametrize(("family", "base"), CASES.values(), ids=CASES.keys())
def test_merged_in_float32_it_generates_what_base_and_adapter_did(
    make_checkpoint: Callable[..., Path], tmp_path: Path, family: str, base: str
) -> None:
    model = "tiny" if family == "tiny" else str(make_checkpoint(family))
    adapter = trained_adapter(tmp_path / "adapter", model, base)
    trained = find_trained(adapter, model, base)
    made = export_merged(trained, tmp_path / "out", "float32", "cpu", True, Watch())
    assert made.difference is not None
    assert made.difference.largest < 1e-4
    assert made.difference.effect_kl > 1e-3  # the adapter does something
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    expected = generated_by_us(model, base, adapter)
    assert generated_by_transformers(merged) == expected
    assert generated_by_us(model, base, None) != expected
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "float32"


def dequantized_base(model: str, base: str) -> transformers.PreTrainedModel:
    """The 16-bit model with the 4-bit base's weights, put together by hand."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(resolve(model), dtype=torch.float32)
    with Checkpoint(weights_folder(model, base)) as source, torch.no_grad():
        for module in source.quantized_modules:
            plain.get_submodule(module).weight.copy_(dequantize(source.read_quantized(module)))
    return plain


@pytest.mark.parametrize("norms", [True, False])
def test_the_adapter_goes_through_peft_on_the_dequantized_base(tmp_path: Path, norms: bool) -> None:
    adapter = trained_adapter(tmp_path / "adapter", "tiny", "nvfp4", norms)
    export_adapter(find_trained(adapter, base="nvfp4"), tmp_path / "out", Watch())
    model = peft.PeftModel.from_pretrained(dequantized_base("tiny", "nvfp4"), tmp_path / "out")
    assert generated_by_transformers(model) == generated_by_us("tiny", "nvfp4", adapter)


def test_peft_merges_to_the_weights_that_we_write(tmp_path: Path) -> None:
    adapter = trained_adapter(
        tmp_path / "adapter", "tiny", "nf4", use_rslora=True, target_modules=("q_proj", "down_proj")
    )
    trained = find_trained(adapter, base="nf4")
    export_merged(trained, tmp_path / "out", "float32", "cpu", True, Watch())
    ours = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    theirs = peft.PeftModel.from_pretrained(dequantized_base("tiny", "nf4"), adapter).merge_and_unload().state_dict()
    theirs.pop("lm_head.weight")  # tied
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-6, atol=1e-6)


def test_in_16_bits_and_shards_it_loses_no_more_than_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qerl.export.plain.LARGEST_SHARD", 1_000_000)
    adapter = trained_adapter(tmp_path / "adapter", "tiny", "nvfp4")
    made = export_merged(find_trained(adapter, base="nvfp4"), tmp_path / "out", "bfloat16", "cpu", True, Watch())
    assert made.difference is not None
    assert made.difference.relative < 2**-7
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert json.loads((tmp_path / "out" / REPORT).read_text())["difference"]["kl"] == made.difference.kl
    # What rounding takes from a gain is given to the matrices that read it: better than rounding each by itself.
    exact = export_merged(find_trained(adapter, base="nvfp4"), tmp_path / "exact", "float32", "cpu", False, Watch())
    rounded = transformers.AutoModelForCausalLM.from_pretrained(exact.out, dtype=torch.bfloat16).float()
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).float()
    truth = transformers.AutoModelForCausalLM.from_pretrained(exact.out, dtype=torch.float32)
    ids = torch.arange(2, 42).view(1, -1)
    with torch.no_grad():
        errors = [float((model(ids).logits - truth(ids).logits).square().mean()) for model in (ours, rounded)]
    assert errors[0] < errors[1]


def test_for_vllm_lora_stands_alone_and_the_base_has_the_norms(tmp_path: Path) -> None:
    adapter = trained_adapter(tmp_path / "adapter", "tiny", "nvfp4")
    made = export_for_vllm(find_trained(adapter, base="nvfp4"), tmp_path / "out", "cpu", True, Watch())
    config = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    assert config["modules_to_save"] is None
    names = safetensors.torch.load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert all("lora_" in name for name in names)
    stored = safetensors.torch.load_file(adapter / "adapter_model.safetensors")
    gain = stored["base_model.model.model.layers.1.input_layernorm.weight"]
    with Checkpoint(tmp_path / "out" / "base") as base, Checkpoint(weights_folder("tiny", "nvfp4")) as before:
        assert base.config == before.config
        assert torch.equal(base.read("model.layers.1.input_layernorm.weight"), gain.to(torch.bfloat16))
        same = [name for name in base.tensors if torch.equal(base.read(name), before.read(name))]
        assert set(base.tensors) - set(same) == {n.removeprefix("base_model.model.") for n in stored if "norm" in n}
    assert made.difference is not None
    assert made.difference.relative < 2**-7
    assert "--max-lora-rank 8 " in made.notes[0]


def test_for_vllm_without_norms_the_4_bit_base_is_linked_and_a_base_of_ones_own_is_left_where_it_is(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    adapter = trained_adapter(tmp_path / "adapter", "tiny", "nvfp4", norms=False)
    export_for_vllm(find_trained(adapter, base="nvfp4"), tmp_path / "out", "cpu", True, Watch())
    weights = next((tmp_path / "out" / "base").glob("*.safetensors"))
    assert weights.stat().st_nlink > 1
    assert generated_by_us(str(tmp_path / "out" / "base"), "nvfp4", tmp_path / "out" / "adapter") == generated_by_us(
        "tiny", "nvfp4", adapter
    )
    model = str(make_checkpoint("llama"))
    own = trained_adapter(tmp_path / "own", model, "bf16", norms=False)
    made = export_for_vllm(find_trained(own, base="bf16"), tmp_path / "alone", "cpu", True, Watch())
    assert not (tmp_path / "alone" / "base").exists()
    assert f"vllm serve {model} " in made.notes[0]


def test_rounded_to_4_bits_again_it_says_what_was_lost(tmp_path: Path) -> None:
    adapter = trained_adapter(tmp_path / "adapter", "tiny", "nvfp4")
    made = export_nvfp4(find_trained(adapter, base="nvfp4"), tmp_path / "out", "cpu", Watch())
    assert made.difference is not None
    assert made.difference.kl > 1e-4
    assert made.delta_kept is not None
    assert 0 < made.delta_kept < 1
    assert f"{made.delta_kept:.0%} is left" in made.notes[0]
    assert load(str(tmp_path / "out"), "nvfp4", "cpu").source
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "out"]


def test_full_training_is_exported_as_a_plain_model(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    done = qerl.train(tiny_job(tmp_path / "run", "base=full", "max_steps=1", "eval_size=0", "noise.schedule=off"))
    made = export_merged(find_trained(done.output_dir), tmp_path / "out", "float32", "cpu", True, Watch())
    assert made.difference is not None
    assert made.difference.largest < 1e-4
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    before = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_folder(), dtype=torch.float32)
    moved = [n for n, p in merged.named_parameters() if not torch.equal(p, before.get_parameter(n))]
    assert {"model.embed_tokens.weight", "model.layers.3.self_attn.k_proj.bias", "model.norm.weight"} <= set(moved)
    assert "tokenizer.json" in {path.name for path in (tmp_path / "out").iterdir()}
    with pytest.raises(ValueError, match="trained in full: there is no adapter"):
        export_adapter(find_trained(done.output_dir), tmp_path / "adapter", Watch())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_weight_of_full_training_finds_its_name(
    make_checkpoint: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    from qerl.export.trained import TrainedModel
    from qerl.model.adapter import trained_parameters

    changes = {"attention_bias": True} if family == "llama" else {}
    model = str(make_checkpoint(family, **changes))
    decoder = load(model, "bf16", "cpu")
    decoder.train_in_full()
    stored = {name: value.detach() for name, value in trained_parameters(decoder).items()}
    safetensors.torch.save_file(stored, tmp_path / "weights.safetensors")
    trained = TrainedModel(model, "full", None, tmp_path / "weights.safetensors", None)
    export_merged(trained, tmp_path / "out", "bfloat16", "cpu", True, Watch())
    theirs = tiny_model(family, **changes).state_dict()
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_a_wrong_export_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = trained_adapter(tmp_path / "adapter", "tiny", "nvfp4")
    from qerl.export.values import MergedValues

    monkeypatch.setattr(MergedValues, "value", MergedValues.base_value)  # a merge that forgets the adapter
    with pytest.raises(ValueError, match="not the model that was trained"):
        export_merged(find_trained(adapter, base="nvfp4"), tmp_path / "out", "bfloat16", "cpu", True, Watch())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]
