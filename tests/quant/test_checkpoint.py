from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from qerl.model.shapes import shape_of
from qerl.quant import nf4, nvfp4
from qerl.quant.checkpoint import Checkpoint, resolve
from qerl.tiny import tiny_model_folder
from tests.conftest import tiny_model


def test_a_checkpoint_of_llm_compressor_loads_with_equal_values(
    tmp_path: Path, make_checkpoint: Callable[..., Path]
) -> None:
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    model = transformers.AutoModelForCausalLM.from_pretrained(make_checkpoint(), dtype=torch.bfloat16)
    oneshot(model=model, recipe=QuantizationModifier(targets="Linear", scheme="NVFP4A16", ignore=["lm_head"]))
    model.save_pretrained(tmp_path / "theirs", save_compressed=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.bfloat16)
    loaded(input_ids=torch.tensor([[1, 2, 3]]))  # the first forward decompresses
    with Checkpoint(tmp_path / "theirs") as theirs:
        assert len(theirs.quantized_modules) == 14
        for module in theirs.quantized_modules:
            q = theirs.read_quantized(module)
            assert isinstance(q, nvfp4.NVFP4)
            assert torch.equal(nvfp4.dequantize(q, torch.bfloat16), loaded.get_submodule(module).weight)
            sibling = module.replace("q_proj", "v_proj").replace("gate_proj", "up_proj")
            assert torch.equal(q.global_scale, theirs.read_quantized(sibling).global_scale)


@pytest.mark.parametrize("double_quant", [False, True])
def test_a_checkpoint_of_bitsandbytes_loads_with_equal_values(tmp_path: Path, double_quant: bool) -> None:
    import bitsandbytes.functional as bnb

    plain = tmp_path / "plain"
    tiny_model("llama").save_pretrained(plain)
    quantization = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double_quant
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, quantization_config=quantization, device_map="cpu")
    model.save_pretrained(tmp_path / "theirs")
    with Checkpoint(tmp_path / "theirs") as theirs:
        assert len(theirs.quantized_modules) == 14
        for module in theirs.quantized_modules:
            q = theirs.read_quantized(module)
            assert isinstance(q, nf4.NF4)
            assert isinstance(q.absmax, nf4.Nested) == double_quant
            weight = model.get_submodule(module).weight
            assert torch.equal(nf4.dequantize(q, torch.bfloat16), bnb.dequantize_4bit(weight.data, weight.quant_state))


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        Checkpoint(tmp_path)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="never loads"):
        Checkpoint(tmp_path)


def test_a_missing_shard_is_named(make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint(shard="60KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=rf"lacks 1 of its \d+ shards: {shard.name}"):
        Checkpoint(folder)


def test_a_tensor_is_read_from_the_file_that_the_index_names(make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint("llama", shard="60KB")
    shards = sorted(folder.glob("*.safetensors"))
    last = load_file(shards[-1])
    with Checkpoint(folder) as checkpoint:
        name = next(n for n, where in checkpoint.tensors.items() if where.path == shards[0])
        right = checkpoint.read(name)
    save_file(last | {name: torch.zeros_like(right)}, shards[-1], metadata={"format": "pt"})
    with Checkpoint(folder) as checkpoint:
        assert torch.equal(checkpoint.read(name), right)


def test_a_hub_id_is_checked_before_its_weights_are_fetched(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    folder, asked = make_checkpoint(), []

    def snapshot_download(model: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((model, "*.safetensors" in allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve("owner/name") == folder
    assert asked == [("owner/name", False), ("owner/name", True)]

    def refuse(path: Path) -> None:
        raise ValueError("not this one")

    asked.clear()
    with pytest.raises(ValueError, match="not this one"):
        resolve("owner/name", refuse)
    assert asked == [("owner/name", False)]


def test_an_unknown_quantization_is_refused_with_what_is_supported(
    make_checkpoint: Callable[..., Path], edit_config: Callable[..., None]
) -> None:
    folder = make_checkpoint()
    edit_config(folder, quantization_config={"quant_method": "gptq"})
    with pytest.raises(ValueError, match=r"quantized as gptq; qerl reads .*nvfp4-pack-quantized"):
        _ = Checkpoint(folder).quantized_modules


def test_only_a_folder_with_a_model_hides_the_shipped_one(
    make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny").mkdir()  # a run's output_dir, for one
    assert resolve("tiny") == tiny_model_folder()
    assert shape_of("tiny") == shape_of(str(tiny_model_folder()))
    Path("tiny").rmdir()
    make_checkpoint().rename("tiny")
    assert resolve("tiny") == Path("tiny")


def test_a_path_that_does_not_exist_is_not_taken_for_a_hub_id() -> None:
    with pytest.raises(ValueError, match="There is no folder"):
        resolve("./no/such/model")
