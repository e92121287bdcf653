from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from qerl.quant.checkpoint import Checkpoint
from qerl.quant.layout import layout_for
from qerl.quant.plan import make_plan
from tests.conftest import tiny_model

NVFP4 = layout_for("nvfp4")


def plan_of(folder: Path, format: str = "nvfp4", ignore: tuple[str, ...] = ()):
    return make_plan(Checkpoint(folder), layout_for(format), ignore, int(1e9))


def test_fused_layers_form_one_unit_wherever_they_lie(make_checkpoint: Callable[..., Path]) -> None:
    plan = plan_of(make_checkpoint(shard="60KB"))
    groups = [unit.modules for shard in plan.shards for unit in shard if unit.modules]
    at = "model.layers.1"
    assert tuple(f"{at}.self_attn.{p}_proj" for p in "qkv") in groups
    assert tuple(f"{at}.mlp.{p}_proj" for p in ("gate", "up")) in groups
    assert (f"{at}.self_attn.o_proj",) in groups
    assert plan.ignored == ("lm_head",)


def test_ignored_layers_are_copied_and_named(make_checkpoint: Callable[..., Path]) -> None:
    plan = plan_of(make_checkpoint(), ignore=("*.layers.0.*", "re:.*layers.1.*down_proj"))
    assert len(plan.ignored) == 7 + 1 + 1
    quantized = {m for shard in plan.shards for unit in shard for m in unit.modules}
    assert quantized == {
        f"model.layers.1.{m}"
        for m in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
        )
    }


def test_a_pattern_that_matches_nothing_raises(make_checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"'layers\.9' matches no linear layer"):
        plan_of(make_checkpoint(), ignore=("layers.9",))
    with pytest.raises(ValueError, match="nothing left to quantize"):
        plan_of(make_checkpoint(), ignore=("*",))
    with pytest.raises(ValueError, match="not a regular expression"):
        plan_of(make_checkpoint(), ignore=("re:(",))


@pytest.mark.parametrize(("format", "hidden"), [("nvfp4", 72), ("mxfp4", 80), ("nf4", 96)])
def test_a_k_that_blocks_do_not_divide_is_refused(
    make_checkpoint: Callable[..., Path], format: str, hidden: int
) -> None:
    folder = make_checkpoint(hidden_size=hidden, head_dim=16, num_attention_heads=4)
    with pytest.raises(ValueError, match=rf"q_proj has {hidden} inputs.*--ignore '\*\.q_proj'"):
        plan_of(folder, format)


def test_an_already_quantized_model_is_refused(
    make_checkpoint: Callable[..., Path], edit_config: Callable[..., None]
) -> None:
    folder = make_checkpoint()
    edit_config(folder, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ValueError, match=r"already quantized \(fp8\)"):
        plan_of(folder)


def test_an_architecture_without_linear_layers_is_refused(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no linear layers"):
        plan_of(tmp_path / "gpt2")


def test_an_unknown_architecture_is_refused(
    make_checkpoint: Callable[..., Path], edit_config: Callable[..., None]
) -> None:
    folder = make_checkpoint()
    edit_config(folder, model_type="nonesuch")
    with pytest.raises(ValueError, match="can't build a causal language model"):
        plan_of(folder)


def test_weights_of_another_model_are_refused(
    make_checkpoint: Callable[..., Path], edit_config: Callable[..., None]
) -> None:
    folder = make_checkpoint()
    edit_config(folder, num_hidden_layers=3, layer_types=["full_attention"] * 3)
    with pytest.raises(ValueError, match=r"lacks 12 of the 38 tensors of Qwen2ForCausalLM, such as model\.layers\.2\."):
        plan_of(folder)
    edit_config(folder, num_hidden_layers=2, layer_types=["full_attention"] * 2, intermediate_size=256)
    with pytest.raises(ValueError, match=r"gate_proj\.weight has shape \(192, 64\), but .* asks for \(256, 64\)"):
        plan_of(folder)


def test_a_checkpoint_without_embedding_or_head_is_refused(make_checkpoint: Callable[..., Path]) -> None:
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        folder = make_checkpoint("llama")
        tensors = load_file(folder / "model.safetensors")
        tensors.pop(name)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=f"lacks 1 of the 21 tensors of LlamaForCausalLM, such as {name}"):
            plan_of(folder)


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(
        hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_experts=4, vocab_size=64,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "moe")
    with pytest.raises(ValueError, match="is a mixture of experts"):
        plan_of(tmp_path / "moe")


def test_float32_sources_keep_16_bits_elsewhere(tmp_path: Path) -> None:
    tiny_model("qwen2", torch.float32).save_pretrained(tmp_path / "wide")
    plan = plan_of(tmp_path / "wide")
    kept = {spec.dtype for shard in plan.shards for unit in shard if unit.copied for spec in unit.outputs.values()}
    assert kept == {torch.bfloat16}
