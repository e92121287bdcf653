"""LoRA and trained norms, judged by peft on transformers."""

import json
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
import transformers
from torch import Tensor

from qerl.model.adapter import (
    NORMS,
    LoraSettings,
    add_lora,
    load_adapter,
    read_settings,
    save_adapter,
    trained_parameters,
)
from qerl.model.architecture import PROJECTIONS
from qerl.model.decoder import Decoder
from qerl.model.layers import Projection, RMSNorm
from qerl.model.loader import load
from qerl.model.packing import next_tokens, pack
from qerl.model.trained import Trained, refresh
from tests.model.test_decoder import SEQUENCES, log_probs, their_log_probs, worst


def peft_model(folder: Path, norms: bool = True, **changes: object) -> peft.PeftModel:
    """transformers + peft with values that make every part matter."""
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": list(PROJECTIONS)} | changes
    config = peft.LoraConfig(**settings, modules_to_save=list(NORMS) if norms else None, task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


CASES = {
    "all": {},
    "rslora": {"use_rslora": True},
    "two targets": {"target_modules": ["q_proj", "down_proj"]},
    "one layer": {"target_modules": ["model.layers.1.self_attn.v_proj", "model.layers.1.mlp.gate_proj"]},
    "expression": {"target_modules": r".*\.(k|up)_proj"},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_an_adapter_trained_by_peft_gives_the_same_logits_here(
    make_checkpoint: Callable[..., Path], tmp_path: Path, case: str, family: str
) -> None:
    folder = make_checkpoint(family, torch.float32)
    theirs = peft_model(folder, **CASES[case])
    theirs.save_pretrained(tmp_path / "adapter")
    ours = load(str(folder), base="bf16", device="cpu")
    before = log_probs(ours)
    settings = load_adapter(ours, tmp_path / "adapter")
    assert settings.r == 4
    assert settings.train_norms
    assert worst(log_probs(ours), their_log_probs(theirs)) < 1e-4
    assert worst(log_probs(ours), before) > 1e-2


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_of_ours_gives_the_same_logits_in_peft(
    make_checkpoint: Callable[..., Path], tmp_path: Path, case: str
) -> None:
    folder = make_checkpoint("llama", torch.float32)
    ours = load(str(folder), base="bf16", device="cpu")
    changes = {"r": 4, "lora_alpha": 8, "train_norms": case != "two targets"} | CASES[case]
    if isinstance(changes.get("target_modules"), list):
        changes["target_modules"] = tuple(changes["target_modules"])
    settings = LoraSettings(**changes)
    add_lora(ours, settings)
    shake(ours)
    save_adapter(ours, tmp_path / "adapter", base_model=str(folder))
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert worst(log_probs(ours), their_log_probs(theirs)) < 1e-4
    again = load(str(folder), base="bf16", device="cpu")
    load_adapter(again, tmp_path / "adapter")
    assert worst(log_probs(again), log_probs(ours)) == 0


def shake(model: Decoder, seed: int = 5) -> None:
    """Move everything trained a little, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trained_parameters(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.device) * 0.05)
    refresh(model)


def their_gradients(model: torch.nn.Module, device: str = "cpu") -> dict[str, Tensor]:
    """Gradient of the summed log-probs of SEQUENCES' own tokens, in one padded batch."""
    longest = max(map(len, SEQUENCES))
    ids = torch.tensor([s + [0] * (longest - len(s)) for s in SEQUENCES], device=device)
    mask = torch.tensor([[1] * len(s) + [0] * (longest - len(s)) for s in SEQUENCES], device=device)
    logits = model(input_ids=ids, attention_mask=mask).logits.float()
    logp = torch.log_softmax(logits[:, :-1], -1).gather(2, ids[:, 1:, None])[..., 0]
    (logp * mask[:, 1:]).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def our_gradients(model: Decoder, recompute: bool = False) -> dict[str, Tensor]:
    packed = pack(SEQUENCES, model.device)
    places, targets = next_tokens(packed)
    logp, _ = model.logprobs(model(packed, recompute=recompute)[places], targets)
    logp.sum().backward()
    return {name: p.grad for name, p in trained_parameters(model).items() if p.grad is not None}


def close(ours: Tensor, theirs: Tensor) -> bool:
    return float((ours - theirs).norm()) <= 1e-4 * float(theirs.norm())


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
def test_lora_and_norm_gradients_equal_peft_on_a_padded_batch(
    make_checkpoint: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    folder = make_checkpoint(family, torch.float32)
    theirs = peft_model(folder)
    theirs.save_pretrained(tmp_path / "adapter")
    ours = load(str(folder), base="bf16", device="cpu")
    load_adapter(ours, tmp_path / "adapter")
    judge, got = their_gradients(theirs), our_gradients(ours)
    assert len(got) == len(judge) == 2 * 7 * 2 + 2 * 2
    fused = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "o_proj": "o"}
    fused |= {"gate_proj": "gate_up", "up_proj": "gate_up", "down_proj": "down"}
    for i in range(2):
        for part, projection in fused.items():
            room = "self_attn" if part in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            inner = "attention" if room == "self_attn" else "mlp"
            for side in "AB":
                name = f"blocks.{i}.{inner}.{projection}.lora.{part}.{side.lower()}.master"
                their_name = f"base_model.model.model.layers.{i}.{room}.{part}.lora_{side}.default.weight"
                assert close(got[name], judge[their_name]), name
        for ours_norm, their_norm in (("input_norm", NORMS[0]), ("post_attention_norm", NORMS[1])):
            their_name = f"base_model.model.model.layers.{i}.{their_norm}.modules_to_save.default.weight"
            assert close(got[f"blocks.{i}.{ours_norm}.trained"], judge[their_name])


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_full_training_has_the_gradients_of_transformers(make_checkpoint: Callable[..., Path], family: str) -> None:
    folder = make_checkpoint(family, torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = load(str(folder), base="bf16", device="cpu")
    ours.train_in_full()
    judge, got = their_gradients(theirs), our_gradients(ours)
    parameters = sum(p.numel() for p in trained_parameters(ours).values())
    assert parameters == sum(p.numel() for p in theirs.parameters())
    assert close(got["embedding.trained.master"], judge["model.embed_tokens.weight"])  # tied: the head's is in it
    at = "model.layers.1"
    qkv = torch.cat([judge[f"{at}.self_attn.{p}_proj.weight"] for p in "qkv"])
    assert close(got["blocks.1.attention.qkv.weight.trained.master"], qkv)
    assert close(got["blocks.1.mlp.down.weight.trained.master"], judge[f"{at}.mlp.down_proj.weight"])
    assert close(got["norm.trained"], judge["model.norm.weight"])
    if family == "qwen2":
        bias = torch.cat([judge[f"{at}.self_attn.{p}_proj.bias"] for p in "qkv"])
        assert close(got["blocks.1.attention.qkv.trained_bias.master"], bias)


def test_full_training_needs_a_16_bit_base_without_lora(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = str(make_checkpoint())
    with pytest.raises(ValueError, match="needs a 16-bit base"):
        load(folder, base="nvfp4", device="cpu", cache_dir=tmp_path / "c").train_in_full()
    model = load(folder, base="bf16", device="cpu")
    add_lora(model, LoraSettings(r=2))
    with pytest.raises(ValueError, match="exclude each other"):
        model.train_in_full()


def test_fresh_lora_changes_nothing_and_is_initialised_as_peft_does(make_checkpoint: Callable[..., Path]) -> None:
    model = load(str(make_checkpoint("llama")), base="bf16", device="cpu")
    before = log_probs(model)
    add_lora(model, LoraSettings(r=16, train_norms=True))
    assert worst(log_probs(model), before) == 0
    a = model.blocks[0].mlp.down.lora["down_proj"].a.master.detach()
    bound = 192**-0.5  # kaiming_uniform(a=sqrt(5)) of a layer with 192 inputs
    assert float(a.abs().max()) <= bound
    assert float(a.std()) == pytest.approx(bound / 3**0.5, rel=0.05)


def test_disabling_the_adapter_gives_the_reference_policy_and_comes_back(make_checkpoint: Callable[..., Path]) -> None:
    model = load(str(make_checkpoint("qwen2")), base="bf16", device="cpu")
    reference = log_probs(model)
    add_lora(model, LoraSettings(r=4, train_norms=True))
    shake(model)
    trained = log_probs(model)
    assert worst(trained, reference) > 1e-2
    with model.adapter_disabled():
        assert worst(log_probs(model), reference) == 0
    assert worst(log_probs(model), trained) == 0


def test_a_thousand_updates_of_1e_5_move_a_gain_of_one(make_checkpoint: Callable[..., Path]) -> None:
    model = load(str(make_checkpoint("llama")), base="bf16", device="cpu", dtype=torch.bfloat16)
    add_lora(model, LoraSettings(r=4, train_norms=True))
    before = log_probs(model)
    gain = model.blocks[0].input_norm.trained
    lora = model.blocks[0].attention.o.lora["o_proj"].b
    assert torch.equal(gain, torch.ones_like(gain))
    optimizer = torch.optim.SGD([gain, lora.master], lr=1e-5)
    for _ in range(1000):
        gain.grad, lora.master.grad = torch.full_like(gain, -1.0), torch.full_like(lora.master, -1.0)
        optimizer.step()
        refresh(model)
    assert torch.allclose(gain, torch.full_like(gain, 1.01), atol=1e-5)
    assert lora.copy.dtype == torch.bfloat16
    assert torch.allclose(lora.copy.float(), torch.full_like(lora.master, 0.01), rtol=5e-3)
    assert worst(log_probs(model), before) > 0


def test_updates_and_loads_keep_addresses(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = str(make_checkpoint("llama"))
    model = load(folder, base="bf16", device="cpu", dtype=torch.bfloat16)
    settings = LoraSettings(r=4, train_norms=True)
    add_lora(model, settings)
    places = {id(m): (m.master.data_ptr(), m.copy.data_ptr()) for m in model.modules() if isinstance(m, Trained)}
    norms = {id(m): m.trained.data_ptr() for m in model.modules() if isinstance(m, RMSNorm) and m.trained is not None}
    assert places
    assert norms
    shake(model, seed=8)
    saved = log_probs(model)
    save_adapter(model, tmp_path / "old")
    shake(model)
    assert worst(log_probs(model), saved) > 0
    load_adapter(model, tmp_path / "old")
    assert worst(log_probs(model), saved) == 0
    for module in model.modules():
        if isinstance(module, Trained):
            assert places[id(module)] == (module.master.data_ptr(), module.copy.data_ptr())
        elif isinstance(module, RMSNorm) and module.trained is not None:
            assert norms[id(module)] == module.trained.data_ptr()


def test_lora_laid_out_for_kernels_trains_as_it_does_apart(tmp_path: Path) -> None:
    apart, laid_out = (load("tiny", base="bf16", device="cpu", dtype=torch.bfloat16) for _ in range(2))
    projections = [module for module in laid_out.modules() if isinstance(module, Projection)]
    for model in (apart, laid_out):
        add_lora(model, LoraSettings(r=4, target_modules=("k_proj", "up_proj", "down_proj")))
        shake(model)

    def same() -> bool:
        ours, theirs = (gradients_of(model) for model in (laid_out, apart))
        return all(float((ours[name] - one).norm()) <= 2**-6 * float(one.norm()) for name, one in theirs.items())

    for turn in range(2):  # a second time: LoRA that is laid out anew
        for projection in projections:
            projection.lay_out_lora(torch.bfloat16)
        assert same()
        for model in (apart, laid_out):
            shake(model, seed=turn)  # an update
        assert same()
    save_adapter(apart, tmp_path / "saved")
    shake(apart, seed=9)
    for model in (apart, laid_out):
        load_adapter(model, tmp_path / "saved")
    assert same()


def gradients_of(model: Decoder) -> dict[str, Tensor]:
    packed = pack([[6, 7, 8, 9, 10], [11, 12, 13]])
    places, targets = next_tokens(packed)
    parameters = trained_parameters(model)
    loss = model.logprobs(model(packed)[places], targets)[0].sum()
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def test_targets_that_match_nothing_raise_and_name_what_exists(make_checkpoint: Callable[..., Path]) -> None:
    model = load(str(make_checkpoint()), base="bf16", device="cpu")
    for targets in (("q_proj", "c_attn"), ("layers.9.q_proj",), r".*\.c_fc", ()):
        with pytest.raises(ValueError, match=r"match(es)? nothing\..*The model has q_proj|No LoRA targets"):
            add_lora(model, LoraSettings(target_modules=targets))
    with pytest.raises(ValueError, match=r"endings of names are a list: \[q_proj, v_proj\]"):
        add_lora(model, LoraSettings(target_modules="q_proj,v_proj"))


def test_an_adapter_of_another_scale_is_not_written_into_this_one(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = str(make_checkpoint())
    eight, thirty_two = (load(folder, base="bf16", device="cpu") for _ in range(2))
    add_lora(eight, LoraSettings(r=4, lora_alpha=8))
    add_lora(thirty_two, LoraSettings(r=4, lora_alpha=32))
    save_adapter(eight, tmp_path / "eight")
    with pytest.raises(ValueError, match=r"scales its LoRA by 2 .* adapter by 8"):
        load_adapter(thirty_two, tmp_path / "eight")


def test_a_refused_adapter_leaves_the_model_as_it_was(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_checkpoint("qwen2", torch.float32)
    other = load(str(make_checkpoint("qwen2", torch.float32, intermediate_size=128)), base="bf16", device="cpu")
    add_lora(other, LoraSettings(r=4))
    save_adapter(other, tmp_path / "other")
    peft_model(folder).save_pretrained(tmp_path / "good")
    model = load(str(folder), base="bf16", device="cpu")
    with pytest.raises(ValueError, match=r"does not fit this model: .* has shape .* was made for .*; this is "):
        load_adapter(model, tmp_path / "other")
    assert trained_parameters(model) == {}
    load_adapter(model, tmp_path / "good")


def test_full_training_keeps_no_reference_and_saves_no_adapter(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = load(str(make_checkpoint()), base="bf16", device="cpu")
    with pytest.raises(ValueError, match="no adapter to save"):
        save_adapter(model, tmp_path / "none")
    model.train_in_full()
    with pytest.raises(ValueError, match="no adapter to save"):
        save_adapter(model, tmp_path / "none")
    with pytest.raises(ValueError, match="keeps no reference"), model.adapter_disabled():
        pass
    with pytest.raises(ValueError, match="already"):
        model.train_in_full()


@pytest.mark.parametrize("recompute", [False, True])
def test_bf16_gradients_err_at_most_twice_as_much_as_transformers_bf16(
    make_checkpoint: Callable[..., Path], recompute: bool
) -> None:
    folder = make_checkpoint("llama", torch.bfloat16)  # untied: the head has a gradient of its own
    grads = {}
    for dtype in (torch.float32, torch.bfloat16):
        grads[dtype] = their_gradients(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype))
    ours = load(str(folder), base="bf16", device="cpu", dtype=torch.bfloat16)
    ours.train_in_full()
    got = our_gradients(ours, recompute)
    at = "model.layers.0"
    pairs = {
        "embedding.trained.master": ["model.embed_tokens.weight"],
        "untied_head.trained.master": ["lm_head.weight"],
        "blocks.0.attention.qkv.weight.trained.master": [f"{at}.self_attn.{p}_proj.weight" for p in "qkv"],
        "blocks.0.mlp.gate_up.weight.trained.master": [f"{at}.mlp.{p}_proj.weight" for p in ("gate", "up")],
        "blocks.0.mlp.down.weight.trained.master": [f"{at}.mlp.down_proj.weight"],
        "blocks.0.input_norm.trained": [f"{at}.input_layernorm.weight"],
    }
    for name, theirs in pairs.items():
        exact, low = (torch.cat([grads[dtype][n].float() for n in theirs]) for dtype in (torch.float32, torch.bfloat16))
        assert got[name].dtype == torch.float32
        assert float((got[name] - exact).norm()) <= 2 * float((low - exact).norm()), name


FEATURES = {
    "use_dora": True,
    "rank_pattern": {"q_proj": 8},
    "alpha_pattern": {"q_proj": 8},
    "bias": "all",
    "layers_to_transform": [0],
    "init_lora_weights": "pissa",
    "modules_to_save": ["lm_head"],
    "exclude_modules": ["layers.0"],
    "use_bdlora": {"a": 1},
    "a_feature_of_tomorrow": True,
}


@pytest.mark.parametrize("feature", FEATURES)
def test_peft_features_that_are_missing_here_are_refused_by_name(tmp_path: Path, feature: str) -> None:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], feature: FEATURES[feature]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=feature):
        read_settings(tmp_path)


def test_adapters_that_do_not_fit_are_refused(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = load(str(make_checkpoint()), base="bf16", device="cpu")
    with pytest.raises(ValueError, match="not a PEFT adapter folder"):
        load_adapter(model, tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with pytest.raises(ValueError, match="IA3 adapter; only LORA"):
        load_adapter(model, tmp_path)
    for text, message in (
        ("[]", "a None adapter; only LORA"),
        ('{"peft_type": "LORA", "r": 4, "target_modules": null}', "has no lora_alpha, target_modules"),
    ):
        (tmp_path / "adapter_config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_adapter(model, tmp_path)
    settings = LoraSettings(r=4)
    add_lora(model, settings)
    save_adapter(model, tmp_path / "four")
    with pytest.raises(ValueError, match="exists"):
        save_adapter(model, tmp_path / "four")
    other = load(str(make_checkpoint()), base="bf16", device="cpu")
    add_lora(other, LoraSettings(r=4, target_modules=("q_proj",)))
    with pytest.raises(ValueError, match="does not fit the adapter that the model has"):
        load_adapter(other, tmp_path / "four")
    third = load(str(make_checkpoint()), base="bf16", device="cpu")
    add_lora(third, LoraSettings(r=8))
    with pytest.raises(ValueError, match="does not fit"):
        load_adapter(third, tmp_path / "four")
