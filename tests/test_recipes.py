"""Every recipe loads, and every training recipe has a plan, in every base, without a GPU or a download."""

import socket
from pathlib import Path

import pytest
import yaml

from qerl.recipe import load_config
from qerl.rl.plan import make_plan

RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml"))
TRAINING = [path for path in RECIPES if "task" in yaml.safe_load(path.read_text())]
MODELS = ("qwen2_5_3b", "qwen2_5_7b", "qwen2_5_14b", "qwen2_5_32b", "llama3_1_8b", "qwen3_4b", "qwen3_8b")


def test_the_recipes_that_the_docs_promise_are_there() -> None:
    names = {path.stem for path in RECIPES}
    assert {f"{task}_{model}" for task in ("gsm8k", "bigmath") for model in MODELS} <= names
    assert {"dapo_math_qwen2_5_7b", "mbpp_qwen2_5_3b", "gsm8k_smollm2_135m", "nf4_qlora", "nvfp4_awq"} <= names


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_and_is_short(recipe: Path) -> None:
    load_config(recipe)
    assert len(recipe.read_text().splitlines()) < 25


@pytest.mark.parametrize("base", ["nvfp4", "bf16", "nf4", "mxfp4", "full"])
@pytest.mark.parametrize("recipe", TRAINING, ids=lambda path: path.stem)
def test_every_training_recipe_is_planned_with_every_base_by_one_override(
    recipe: Path, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "socket", None)  # whoever reached for the network would fail
    plan = make_plan(load_config(recipe, [f"base={base}"]))
    assert plan.steps is not None
    assert plan.updates is not None
    assert plan.updates >= plan.steps > 0
    assert plan.memory.update_peak > plan.memory.weights > 0


@pytest.mark.parametrize("recipe", TRAINING, ids=lambda path: path.stem)
def test_every_recipe_fits_one_80_gb_gpu_as_it_stands(recipe: Path) -> None:
    assert make_plan(load_config(recipe), 80).fits


@pytest.mark.parametrize("task", ["gsm8k", "bigmath"])
@pytest.mark.parametrize("model", MODELS)
def test_the_papers_settings_are_in_its_recipes(task: str, model: str) -> None:
    config = load_config(Path(__file__).parent.parent / "recipes" / f"{task}_{model}.yaml")
    assert config.prompts_per_step * config.num_generations == 128
    assert config.num_generations == {"gsm8k": 8, "bigmath": 16}[task]
    assert config.steps_per_generation * config.num_iterations == {"gsm8k": 4, "bigmath": 1}[task]
    assert config.max_completion_length == {"gsm8k": 4096, "bigmath": 8192}[task]
    assert (config.base, config.optim, config.learning_rate) == ("nvfp4", "adamw_8bit", 1e-5)
    assert (config.epsilon, config.epsilon_high, config.beta, config.temperature) == (0.2, 0.28, 0.0, 1.0)
    assert (config.lora_r, config.max_grad_norm, config.weight_decay, config.warmup_steps) == (32, 0.2, 0.1, 0.1)
    assert (config.noise.sigma_start, config.noise.sigma_end, config.noise.num_stages) == (1e-2, 5e-4, 10)
