"""`qerl plan`: counts that a person can check by hand, and refusals."""

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qerl.cli import app
from qerl.config import Config
from qerl.recipe import build_config
from qerl.rl.plan import make_plan
from qerl.rl.sizes import largest_micro_batch
from qerl.tasks.size import training_rows


def config(**changes: object) -> Config:
    settings = {"model": "Qwen/Qwen2.5-7B-Instruct", "task": "gsm8k", "max_completion_length": 1024}
    return build_config(settings | changes)


def test_counts_follow_from_the_settings() -> None:
    plan = make_plan(config(prompts_per_step=32, num_generations=8, steps_per_generation=2, num_iterations=3))
    assert plan.rows == 7473
    assert plan.steps == round(7473 / 32)
    assert plan.updates == 6 * plan.steps
    assert plan.completions_a_step == 256
    assert plan.sampled_tokens == plan.steps * 256 * 1024
    assert plan.updated_tokens == plan.steps * 32 * (512 + 8 * 1024) * 3  # a prompt once
    assert plan.epochs == pytest.approx(1.0, abs=0.01)


def test_a_group_that_micro_batches_cut_has_its_prompt_in_each() -> None:
    plan = make_plan(config(prompts_per_step=32, num_generations=8, max_steps=1, micro_batch_tokens=512 + 3 * 1024))
    assert plan.updated_tokens == 32 * (3 * 512 + 8 * 1024)
    two = config(prompts_per_step=4, num_generations=3, steps_per_generation=2)
    assert largest_micro_batch(two) == 2 * (512 + 3 * 1024)


def test_data_of_unknown_size_leaves_the_steps_open_unless_they_are_given() -> None:
    open_ = make_plan(config(task="someone/else"))
    assert (open_.rows, open_.steps, open_.sampled_tokens) == (None, None, None)
    given = make_plan(config(task="someone/else", max_steps=10))
    assert (given.steps, given.epochs) == (10, None)


def test_local_data_is_counted(tmp_path: Path) -> None:
    row = json.dumps({"question": "1 + 1?", "answer": "It is 2.\n#### 2"})
    (tmp_path / "gsm8k_train.jsonl").write_text(f"{row}\n" * 7)
    assert training_rows(config(data_dir=tmp_path)) == 7
    (tmp_path / "own.jsonl").write_text('{"prompt": "a"}\n' * 3)
    assert training_rows(config(task=str(tmp_path / "own.jsonl"))) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "someone/unheard-of"}, "not known without a download"),
        ({"model": "no-such-folder"}, "not known without a download"),
        ({"task": "gsm9k"}, "Did you mean gsm8k"),
        ({"task": "math500"}, "evaluation only"),
        ({"max_steps": 0}, "nothing to train"),
        ({"lora_target_modules": ["w_proj"]}, "matches nothing"),
    ],
)
def test_what_can_not_be_planned_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(config(**changes))


def test_what_does_not_fit_comes_with_a_change_that_does() -> None:
    wide = make_plan(config(base="bf16", micro_batch_tokens=65536), 40)
    assert not wide.fits
    assert wide.advice.startswith("micro_batch_tokens=")
    key, _, value = wide.advice.partition("=")
    assert make_plan(config(base="bf16", **{key: int(value)}), 40).fits
    assert make_plan(config(model="Qwen/Qwen2.5-32B-Instruct", base="bf16"), 60).advice == "base=nvfp4"
    none = make_plan(config(model="Qwen/Qwen2.5-32B-Instruct"), 8)
    assert none.advice == ""
    assert "of weights that forwards read" in none.too_large


def test_advice_goes_as_far_as_it_must() -> None:
    """Several changes at once, lengths cut more than once; what is advised fits, and its settings are valid."""
    for gpu, setting in ((9.6, "max_completion_length"), (9.3, "prompts_per_step")):
        asked = {"max_completion_length": 4096, "num_generations": 16, "steps_per_generation": 2}
        plan = make_plan(config(**asked), gpu)
        assert not plan.fits
        changed = dict(word.split("=") for word in plan.advice.split())
        assert setting in changed, plan.advice
        assert make_plan(config(**(asked | changed)), gpu).fits
    uncorrected = make_plan(config(**{"correction.form": "off"}), 9)
    assert "fp8" not in uncorrected.advice


def test_a_cache_for_few_is_no_reason_to_refuse() -> None:
    plan = make_plan(config(optim="adamw_8bit", max_prompt_length=384, micro_batch_tokens=1408), 12)
    assert plan.fits
    assert 1 <= plan.whole_sequences < plan.step_sequences


def test_more_blocks_than_there_are_can_not_be_recomputed() -> None:
    with pytest.raises(ValueError, match="has 28 blocks"):
        make_plan(config(recompute=29))
    assert make_plan(config(recompute=28)).recomputed_blocks == 28


def test_full_training_that_does_not_fit_is_first_advised_to_be_lora() -> None:
    assert make_plan(config(base="full"), 40).advice == "base=bf16"


def test_the_command_fails_where_it_does_not_fit_and_says_when_the_cache_is_small() -> None:
    words = ["plan", "model=Qwen/Qwen2.5-7B-Instruct", "task=gsm8k", "max_completion_length=4096"]
    small = CliRunner().invoke(app, [*words, "--gpu", "3"])
    assert small.exit_code == 1
    assert json.loads(small.stdout.splitlines()[-1])["fits"] is False
    tight = CliRunner().invoke(app, [*words, "prompts_per_step=64", "--gpu", "24"])
    assert tight.exit_code == 0, tight.output
    assert "sampling will be slow" in tight.output
    found = json.loads(tight.stdout.splitlines()[-1])
    assert found["step_sequences"] > 4 * found["whole_sequences"]
    assert "kv_cache_dtype=fp8" in tight.output  # what to do about it
    table = tight.stdout.partition("{")[0]
    assert all(f"{found['memory_gb'][part]:.2f}" in table for part in ("workspace", "update_margin", "sample_margin"))
    assert "micro_batch_tokens=16384" in table


def test_the_command_prints_tables_and_one_line_of_json() -> None:
    words = "plan model=tiny task=countdown max_steps=5 max_prompt_length=128 max_completion_length=128 --gpu 24"
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 0, done.output
    assert "while it samples" in done.stdout
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["steps"], result["fits"], result["gpu_gb"]) == (5, True, 24.0)
    assert result["memory_gb"]["updating"] >= result["memory_gb"]["weights"]


def test_what_the_model_cannot_see_is_refused_as_a_run_refuses_it() -> None:
    with pytest.raises(ValueError, match="make 40512 tokens; the model's context is 32768"):
        make_plan(config(max_completion_length=40000))
    assert make_plan(config(model="Qwen/Qwen2.5-7B", max_completion_length=40000)).completions_a_step > 0  # 131072


@pytest.mark.parametrize("memory", [math.inf, math.nan, 0.0, -5.0])
def test_memory_that_no_gpu_has_is_refused(memory: float) -> None:
    with pytest.raises(ValueError, match=f"a number above 0 such as 80, not {memory:g}"):
        make_plan(config(), memory)
