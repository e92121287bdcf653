"""Recipes and overrides, and what is said about mistakes in them."""

from pathlib import Path

import pytest
import yaml

from qerl.config import Config, ConfigError
from qerl.recipe import build_config, default_recipe, load_config, training_recipe


def test_recipe_then_overrides(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump({"quantize": {"method": "rtn", "format": "mxfp4", "ignore": ["*.0.*"]}}))
    config = load_config(recipe, ["quantize.format=nf4", "quantize.double_quant=true"]).quantize
    assert (config.method, config.format, config.double_quant, config.ignore) == ("rtn", "nf4", True, ("*.0.*",))


def test_a_single_pattern_may_stand_without_a_list() -> None:
    assert load_config(None, ["quantize.ignore=*.layers.0.*"]).quantize.ignore == ("*.layers.0.*",)
    assert load_config(None, ["quantize.ignore=[a, b]"]).quantize.ignore == ("a", "b")
    assert load_config(None, ["quantize.ignore=re:a{1,2}"]).quantize.ignore == ("re:a{1,2}",)
    config = load_config(None, ["reward_funcs=gsm8k_accuracy", "reward_weights=2", "arithmetic.levels=3"])
    assert (config.reward_funcs, config.reward_weights, config.arithmetic.levels) == (("gsm8k_accuracy",), (2.0,), (3,))
    config = load_config(None, ["lora_target_modules=q_proj", "noise.target_entropy=1", "noise.profile=linear"])
    assert (config.lora_target_modules, config.noise.target_entropy, config.noise.profile) == ("q_proj", 1.0, "linear")


def test_an_empty_recipe_is_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("# nothing\n")
    assert load_config(tmp_path / "r.yaml") == Config()
    (tmp_path / "r.yaml").write_text("quantize:\n")
    assert load_config(tmp_path / "r.yaml") == Config()
    assert load_config(tmp_path / "r.yaml", ["quantize.method=rtn"]).quantize.method == "rtn"


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("quantize.metod=rtn", "There is no setting quantize.metod. Did you mean quantize.method?"),
        ("metod=rtn", "Did you mean quantize.method?"),
        ("quantise.format=nf4", "Did you mean quantize.format?"),
        ("quantize.calibration.num_sample=3", "Did you mean quantize.calibration.num_samples?"),
        ("quantize.max_shard_size=big", "quantize.max_shard_size = 'big' is not usable"),
        ("quantize.max_shard_size=-1", "greater than 0"),
        ("quantize.max_shard_size=true", "where a float belongs"),
        ("quantize.max_shard_size=.inf", "less than or equal to 1000"),
        ("quantize.format=int4", "'nvfp4', 'mxfp4' or 'nf4'"),
        ("quantize=3", "quantize = 3 is not usable: it is a section. Write quantize.format=VALUE"),
        ("recompute=selective", "recompute = 'selective' is not usable: write auto, all, none or a whole number. ("),
        ("noise.profile=[a,b]", "noise.profile = ['a', 'b'] is not usable: write uniform, linear or a list of numbers"),
        ("noise.target_entropy=high", "write a number or a list of 2 numbers in brackets"),
        ("eval_steps=0", "never: eval_size=0"),
        ("quantize.format.x=3", "quantize.format"),
        ("nonsense", "write key=value"),
        ("quantize.ignore=[", "is not YAML"),
        ("learning_rat=1", "Did you mean learning_rate?"),
        ("per_device_train_batch_size=4", "prompts_per_step x num_generations completions are a rollout"),
        ("learning_rate=", "Write learning_rate=VALUE; learning_rate=null is qerl's default"),
        ("lr=1e-4", "There is no setting lr: write learning_rate."),
        ("lora_dropout=0.1", "LoRA has no dropout; drop it"),
        ("use_vllm=true", "qerl samples with its own engine"),
        ("temperature=0", "greater than or equal to 0.001"),
        ("noise.num_stages=1", "greater than or equal to 2"),
        ("report_to=wandb,tensorboard", "A list is written in brackets: [wandb,tensorboard]."),
        ("reward_funcs=true", "reward_funcs = True is not usable"),
    ],
)
def test_errors_name_the_key_and_the_remedy(override: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, [override])
    assert hint in str(error.value)


def test_off_is_a_word_also_where_yaml_reads_it_as_false() -> None:
    assert load_config(None, ["noise.schedule=off", "correction.form=off"]).noise.schedule == "off"


def test_a_broken_recipe_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no recipe"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"is a folder, not a recipe .* --resume output_dir="):
        load_config(tmp_path)
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match=r"bad\.yaml is not valid YAML"):
        load_config(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(ConfigError, match="key: value"):
        load_config(tmp_path / "list.yaml")
    for text in ("1: 2\n", "noise:\n  on: 2\n"):
        (tmp_path / "number.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"There is no setting (1|True): a setting's name is text"):
            training_recipe(tmp_path / "number.yaml", [])


def test_the_values_that_a_config_is_built_from_stay_as_they_were() -> None:
    values = {"noise": {"num_stages": 5}, "noise.schedule": "off"}
    assert build_config(values).noise.schedule == "off"
    assert values == {"noise": {"num_stages": 5}, "noise.schedule": "off"}


def test_trackers_as_trl_users_write_them() -> None:
    assert load_config(None, ["report_to=wandb"]).report_to == ("wandb",)
    assert load_config(None, ["report_to=[wandb, tensorboard]"]).report_to == ("wandb", "tensorboard")
    for nothing in ("none", "[none]", "[]", "null"):
        assert load_config(None, [f"report_to={nothing}"]).report_to == ()
    with pytest.raises(ConfigError, match="'tensorboard', 'wandb' or 'trackio'"):
        load_config(None, ["report_to=neptune"])


def test_the_default_jobs_settings_are_for_its_model_and_task_alone(tmp_path: Path) -> None:
    assert training_recipe(None, ["max_steps=2"])[0] == training_recipe(None, ["model=tiny"])[0] == default_recipe()
    for word in ("model=Qwen/Qwen3-4B", "task=gsm8k"):
        assert training_recipe(None, [word])[0] is None
    recipe = tmp_path / "r.yaml"
    recipe.write_text("quantize.method: awq\n")
    with pytest.raises(ConfigError, match="a recipe for qerl quantize, not for training"):
        training_recipe(recipe, [])
    recipe.write_text("quantize:\n  method: rtn\nmodel: tiny\n")
    assert training_recipe(recipe, [])[0] == recipe
