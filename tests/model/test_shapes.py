import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from qerl.model.memory import PAPER, weight_bytes
from qerl.model.random_checkpoint import write_random_checkpoint
from qerl.model.shapes import SHAPES, shape_named, shape_of
from qerl.quant.layout import layout_for


@pytest.mark.parametrize("name", SHAPES)
def test_tensors_equal_those_of_transformers(name: str) -> None:
    shape = SHAPES[name]
    config = transformers.AutoConfig.for_model(**shape.config())
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    theirs = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    if shape.tied:
        theirs.pop("lm_head.weight")
    assert {key: spec.shape for key, spec in shape.tensors().items()} == theirs


@pytest.mark.parametrize(("key", "figure"), PAPER.items())
def test_memory_equals_the_papers_figures_to_two_percent(key: tuple[str, str], figure) -> None:
    name, format = key
    assert figure.ours(weight_bytes(SHAPES[name], format)) == pytest.approx(figure.gigabytes, rel=0.02)


def test_memory_equals_the_bytes_of_a_real_conversion(tmp_path: Path) -> None:
    from qerl.quant.checkpoint import Checkpoint
    from qerl.quant.convert import convert
    from qerl.quant.plan import make_plan

    write_random_checkpoint(SHAPES["toy"], tmp_path / "source")
    for format in ("nvfp4", "mxfp4", "nf4"):
        layout = layout_for(format)
        with Checkpoint(tmp_path / "source") as source:
            convert(source, tmp_path / format, layout, make_plan(source, layout, (), int(1e9)))
        assert Checkpoint(tmp_path / format).nbytes == weight_bytes(SHAPES["toy"], format).total


def test_a_random_checkpoint_loads_in_transformers_and_depends_on_its_seed(tmp_path: Path) -> None:
    for seed, folder in ((0, "a"), (0, "b"), (1, "c")):
        write_random_checkpoint(SHAPES["toy"], tmp_path / folder, seed)
    a, b, c = ((tmp_path / f / "model.safetensors").read_bytes() for f in "abc")
    assert a == b
    assert a != c
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert bool(torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all())


def test_an_unknown_shape_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"qwen2\.5-7b"):
        shape_named("qwen9")


def test_a_model_s_shape_is_known_by_hub_id_and_read_from_a_folder(tmp_path: Path) -> None:
    assert shape_of("Qwen/Qwen2.5-7B-Instruct") == SHAPES["qwen2.5-7b"]
    assert shape_of("Qwen/Qwen2.5-7B") == replace(SHAPES["qwen2.5-7b"], context=131072)
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3-4b"].config()))
    assert shape_of(str(tmp_path)).tensors() == SHAPES["qwen3-4b"].tensors()
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ValueError, match="mamba"):
        shape_of(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64, "vocab_size": 9}')
    with pytest.raises(ValueError, match="does not say num_attention_heads, num_hidden_layers, intermediate_size"):
        shape_of(str(tmp_path))
