"""The loop on the shipped tiny model: noise, resume, guards, the default job's variants."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet
import pytest
import torch
import yaml
from trl import GRPOConfig

import qerl
from qerl.config import Config, ConfigError
from qerl.errors import Interrupted
from qerl.metrics import read_metrics
from qerl.model.adapter import trained_parameters
from qerl.model.packing import next_tokens, pack
from qerl.recipe import default_recipe, load_config
from qerl.records import Completion
from qerl.rl.batch import micro_batches
from qerl.rl.folder import resumed_config
from qerl.rl.rollout import train_samples
from qerl.rl.run import build
from qerl.rl.trainer import Trainer
from qerl.tasks import arithmetic
from tests.conftest import Command
from tests.test_cli import last_json, qerl_command


@pytest.fixture(autouse=True)
def few_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_job(folder: Path, *overrides: str) -> Config:
    """The default job, much smaller."""
    small = ("max_steps=2", "prompts_per_step=4", "num_generations=4", "eval_size=8", "eval_steps=100")
    return load_config(default_recipe(), [*small, f"output_dir={folder}", *overrides])


def log_probs(trainer: Trainer, done: list[Completion], prompts: dict[int, tuple[int, ...]], noise: bool):
    packed = pack([[*prompts[c.request], *c.token_ids] for c in done])
    places, targets = next_tokens(packed)
    with torch.no_grad():
        logp, _ = trainer.model.logprobs(trainer.model(packed, noise=noise)[places], targets, 1.0)
    parts = logp.split([length - 1 for length in packed.lengths])
    return [part[len(prompts[c.request]) - 1 :] for part, c in zip(parts, done, strict=True)]


def test_noise_is_in_the_rollout_and_nowhere_else(tmp_path: Path) -> None:
    values = ("noise.schedule=constant", "noise.sigma_start=0.1", "noise.num_stages=2", "max_steps=4")
    noisy = build(tiny_job(tmp_path / "a", *values))
    never = build(tiny_job(tmp_path / "b", "noise.schedule=off", "max_steps=4"))
    clean_evaluation = never.evaluate()
    # Stage 0 is clean: bit for bit what a run without noise samples.
    assert noisy.draw_noise(1) == (0.0, 0)
    position = noisy.source.position
    first = noisy.roll_out()
    assert [(c.token_ids, c.logprobs) for c in first.completions] == [
        (c.token_ids, c.logprobs) for c in never.roll_out().completions
    ]
    # Stage 1 is noisy: the sampler's log-probs are the noisy policy's, and not the clean one's.
    noisy.source.position = position
    assert noisy.draw_noise(3) == (0.1, 1)
    second = noisy.roll_out()
    assert [c.token_ids for c in second.completions] != [c.token_ids for c in first.completions]
    prompts = {group.prompt.id: group.prompt.prompt_ids for group in second.drawn}
    with_noise = log_probs(noisy, second.completions, prompts, noise=True)
    without = log_probs(noisy, second.completions, prompts, noise=False)
    for completion, there in zip(second.completions, with_noise, strict=True):
        assert completion.noise_id == noisy.model.noise_version
        assert torch.allclose(torch.tensor(completion.policy_logprobs), there, atol=1e-4)
    assert max(float((a - b).abs().max()) for a, b in zip(with_noise, without, strict=True)) > 0.01
    # Evaluation is clean while noise is drawn, and so is the loss: its log-probs are the clean ones.
    assert noisy.evaluate() == clean_evaluation
    work = train_samples(noisy.config, second.drawn)
    (micro,) = micro_batches(work, [1.0] * len(work), 10**6, noisy.model.device)
    logp, _ = noisy.updater.logprobs(micro)
    assert torch.allclose(logp.detach(), torch.cat(without), atol=1e-4)
    # Off again, it is as if it had never been on.
    noisy.source.position = position
    noisy.draw_noise(1)
    assert [(c.token_ids, c.logprobs) for c in noisy.roll_out().completions] == [
        (c.token_ids, c.logprobs) for c in first.completions
    ]


@pytest.mark.parametrize("override", ["base=bf16", "base=nf4", "base=mxfp4", "base=full", "noise.schedule=off"])
def test_the_default_job_runs_with_one_override(tmp_path: Path, override: str) -> None:
    result = qerl.train(tiny_job(tmp_path / "run", override))
    assert result.steps == 2
    kept = {path.name for path in result.checkpoint.iterdir()}
    assert kept == {
        "optimizer.safetensors",
        "state.json",
        "checksums.json",
        "weights.safetensors" if override == "base=full" else "adapter",
    }


@pytest.mark.parametrize(
    "override",
    [
        "loss_type=cispo",
        "beta=0.05",
        "importance_sampling_level=sequence",
        "noise.schedule=entropy",
        "noise.in_loss=true",
        "noise.profile=linear",
        "ratio=behaviour",
        "train_norms=true",
        "scale_rewards=batch",
    ],
)
def test_variants_run_and_measure(tmp_path: Path, override: str) -> None:
    qerl.train(tiny_job(tmp_path / "run", override, "steps_per_generation=2", "num_iterations=2", "noise.num_stages=2"))
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert len(lines) == 2
    names = {
        *("reward", "reward_std", "rewards/accuracy/mean", "rewards/accuracy/std", "frac_reward_zero_std", "entropy"),
        *("completions/mean_length", "completions/min_length", "completions/max_length", "completions/clipped_ratio"),
        *("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "num_tokens", "step_time", "loss"),
        *("grad_norm", "learning_rate", "sampling/sampling_logp_difference/mean", "sampling/ess", "noise/sigma"),
        *("sampling/importance_sampling_ratio/mean", "noise/stage", "rollout/tokens_per_s", "memory/peak_gb"),
        *("dynamic_sampling/kept", "dynamic_sampling/resampled", "timing_s/rollout", "timing_s/train", "accuracy"),
        "updates/tokens",
    }
    for line in lines:
        assert names <= line.keys()
        assert all(line[name] is not None for name in names)
        assert math.isfinite(line["loss"])
        assert ("kl" in line) == (override == "beta=0.05")


def test_an_fp8_cache_and_its_mismatch(tmp_path: Path) -> None:
    noise = ("noise.schedule=constant", "noise.sigma_start=0.1", "noise.num_stages=2")
    config = tiny_job(tmp_path, "kv_cache_dtype=fp8", "eval_size=0", *noise)
    qerl.train(config)
    clean, noisy = read_metrics(tmp_path / "metrics.jsonl")
    name, whole = "sampling/fp8_cache_logp_difference", "sampling/sampling_logp_difference"
    assert 0 < clean[f"{name}/mean"] < clean[f"{name}/max"]
    assert clean[f"{name}/mean"] == pytest.approx(clean[f"{whole}/mean"], rel=0.3)  # nothing else differs
    assert 0 < noisy[f"{name}/mean"] < noisy[f"{whole}/mean"]  # the rest is the noise
    with pytest.raises(ConfigError, match=r"Leave the correction on, or set kv_cache_dtype=auto"):
        tiny_job(tmp_path, "kv_cache_dtype=fp8_e4m3", "correction.form=off")


def test_a_run_leaves_what_it_promises(tmp_path: Path, command: Command) -> None:
    done = qerl_command(
        *("train", f"output_dir={tmp_path / 'run'}", "max_steps=3", "prompts_per_step=4", "num_generations=4"),
        *("eval_size=20", "save_steps=1", "save_total_limit=2", "noise.num_stages=3"),
    )
    result = last_json(done)
    assert {"accuracy_before", "accuracy_after", "seconds"} <= result.keys()
    assert 0.1 < result["accuracy_before"] < 0.7
    run = tmp_path / "run"
    assert {path.name for path in run.iterdir()} == {
        "metrics.jsonl",
        "config.yaml",
        "completions",
        "checkpoints",
        "plots",
        "adapter",
    }
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000002", "step-000003"]
    assert {path.stem for path in (run / "plots").iterdir()} == {"reward", "accuracy", "entropy", "sigma", "length"}
    table = pyarrow.parquet.read_table(run / "completions")
    assert {"step", "prompt", "completion", "accuracy", "advantage"} <= set(table.column_names)
    assert set(table["step"].to_pylist()) == {1, 2, 3}
    assert load_config(run / "config.yaml").max_steps == 3
    text = " ".join(done.stderr.split())
    assert "4 prompts x 4 = 16 completions of up to 72 tokens, then makes 1 update of 16 completions" in text
    assert "step 3/3" in text
    assert "Before and after" in done.stdout
    peft_config = json.loads((run / "checkpoints" / "step-000003" / "adapter" / "adapter_config.json").read_text())
    assert peft_config["peft_type"] == "LORA"
    again = command("train", f"output_dir={run}", "max_steps=3")
    assert again.returncode == 2
    assert "holds a run already" in again.stderr


def timeless(path: Path) -> list[dict]:
    """Metrics without what depends on the clock or on memory."""
    odd = ("time", "step_time", "eval_runtime", "rollout/tokens_per_s")
    return [
        {k: v for k, v in line.items() if k not in odd and not k.startswith(("timing_s/", "memory/"))}
        for line in read_metrics(path)
    ]


def test_a_recipe_names_your_graders_in_the_folder_where_the_command_runs(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(
        "import time\ndef long(text, row):\n    return len(text) + 1\ndef hangs(text, row):\n    time.sleep(60)\n"
    )
    recipe = {"reward_funcs": ["my_rewards:long", "my_rewards:hangs"], "reward_timeout": 0.2, "output_dir": "run"}
    small = {"max_steps": 1, "prompts_per_step": 2, "num_generations": 2, "eval_size": 0, "dynamic_sampling": False}
    small |= {"max_prompt_length": 64, "max_completion_length": 8}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe | small))
    script = "import sys; from qerl.cli import main; sys.argv[1:] = ['train', 'recipe.yaml']; main()"
    command = [sys.executable, "-P", "-c", script]  # -P: as the installed `qerl`, which is not in this folder
    environment = os.environ | {"PYTHONPATH": str(Path(qerl.__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert last_json(done)["steps"] == 1
    (line,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert line["rewards/long/mean"] > 0
    assert line["rewards/hangs/mean"] == 0
    assert line["grading/timeout"] == 4
    assert "the grader hangs failed on 4 of 4 samples, which score 0. The first (timeout): no score" in done.stderr


def test_a_grader_that_always_raises_stops_the_run_at_its_first_samples(tmp_path: Path) -> None:
    small = ("prompts_per_step=2", "num_generations=2", "max_completion_length=4")
    for number, eval_size in enumerate(("eval_size=0", "eval_size=2")):
        job = tiny_job(tmp_path / str(number), *small, eval_size, "reward_funcs=['tests.tasks.graders:raises']")
        with pytest.raises(
            ValueError, match=r"raises failed on all of the first \d samples: KeyError: 'no'\s+\S+graders.py"
        ):
            qerl.train(job)


def test_an_interrupted_run_saves_and_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    options = ("max_steps=4", "eval_steps=2", "save_steps=100", "noise.schedule=entropy", "steps_per_generation=2")
    asked: list[int] = []  # once so many steps are done, in a rollout or an evaluation, once

    def accuracy(completions, answer, trainer_state, **kwargs):
        from qerl.tasks.arithmetic import accuracy as grade

        if trainer_state.global_step in asked:
            asked.clear()
            raise KeyboardInterrupt
        return [grade(c, a) for c, a in zip(completions, answer, strict=True)]

    qerl.train(tiny_job(tmp_path / "whole", *options), reward_funcs=accuracy)
    for step in (1, 2):
        folder = tmp_path / str(step)
        asked.append(step)
        with pytest.raises(Interrupted, match=rf"Stopped after step {step} of 4. To go on: qerl train --resume"):
            qerl.train(tiny_job(folder, *options), reward_funcs=accuracy)
        qerl.train(tiny_job(folder, *options), reward_funcs=accuracy, resume=True)
        assert timeless(folder / "metrics.jsonl") == timeless(tmp_path / "whole" / "metrics.jsonl"), step


def test_resume_takes_the_runs_own_settings(tmp_path: Path) -> None:
    qerl.train(tiny_job(tmp_path / "a", "max_steps=1", "eval_size=0"))
    config = resumed_config(tmp_path / "a", ["max_steps=2"])
    assert (config.max_steps, config.prompts_per_step) == (2, 4)
    assert qerl.train(config, resume=True).steps == 2
    assert qerl.train(config, resume=True).steps == 2  # finished: nothing happens
    with pytest.raises(ValueError, match="has done 2 steps already"):
        qerl.train(resumed_config(tmp_path / "a", ["max_steps=1"]), resume=True)
    with pytest.raises(ConfigError, match="learning_rate would make it another run"):
        resumed_config(tmp_path / "a", ["learning_rate=1"])
    with pytest.raises(ConfigError, match="holds no run to resume"):
        resumed_config(tmp_path / "none", [])


def test_updates_that_are_not_finite_are_skipped_and_then_stop_the_run(tmp_path: Path, capsys) -> None:
    trainer = build(tiny_job(tmp_path / "run", "max_steps=5", "max_skipped_updates=2", "eval_size=0"))
    real = trainer.updater._loss
    trainer.updater._loss = lambda micro, tally: real(micro, tally) * math.nan
    with pytest.raises(ValueError, match=r"2 updates in a row.*Lower learning_rate"):
        trainer.train()
    assert (tmp_path / "run" / "checkpoints" / "step-000002" / "state.json").exists()
    assert "the update was skipped" in capsys.readouterr().err


def test_python_runs_resume_only_the_way_they_were_begun(tmp_path: Path) -> None:
    def mine(completions, **kwargs):
        return [float(len(c)) for c in completions]

    config = tiny_job(tmp_path / "run", "max_steps=1", "eval_size=0")
    qerl.train(config, reward_funcs=mine)
    longer = config.model_copy(update={"max_steps": 2})
    with pytest.raises(ValueError, match="begun on 100000 rows with the rewards mine; these are 100000 with accuracy"):
        qerl.train(longer, resume=True)
    with pytest.raises(ConfigError, match="learning_rate would make it another run"):
        qerl.train(longer.model_copy(update={"learning_rate": 1.0}), reward_funcs=mine, resume=True)
    assert qerl.train(longer, reward_funcs=mine, resume=True).steps == 2


def test_a_reward_function_that_fails_costs_no_finished_step(tmp_path: Path) -> None:
    def accuracy(completions, trainer_state, **kwargs):
        if trainer_state.global_step == 2:
            raise RuntimeError("the judge is gone")
        return [float(i % 2) for i in range(len(completions))]

    with pytest.raises(ValueError, match="accuracy raised RuntimeError: the judge is gone"):
        qerl.train(tiny_job(tmp_path / "run", "max_steps=4", "eval_size=0"), reward_funcs=accuracy)
    assert (tmp_path / "run" / "checkpoints" / "step-000002").is_dir()


def test_rows_without_accuracy_are_judged_by_their_reward(tmp_path: Path) -> None:
    """Several tasks in one data set: where the accuracy reward does not apply, the sum decides what varies."""

    def accuracy(completions, **kwargs):
        return [None] * len(completions)

    def length(completions, **kwargs):
        return [float(i) for i in range(len(completions))]

    qerl.train(tiny_job(tmp_path / "run", "max_steps=1", "eval_size=0"), reward_funcs=[accuracy, length])
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["dynamic_sampling/kept"] == 4


def test_a_grader_in_the_workers_gives_the_run_that_a_function_gives(tmp_path: Path) -> None:
    def sum_accuracy(completions, answer, **kwargs):
        return [arithmetic.accuracy(c, a) for c, a in zip(completions, answer, strict=True)]

    qerl.train(tiny_job(tmp_path / "a"), reward_funcs=sum_accuracy)
    qerl.train(tiny_job(tmp_path / "b", "reward_funcs=['tests.tasks.graders:sum_accuracy']"))
    lines = timeless(tmp_path / "b" / "metrics.jsonl")
    assert lines[-2]["grading/timeout"] == 0
    assert [{k: v for k, v in line.items() if "grading" not in k} for line in lines] == timeless(
        tmp_path / "a" / "metrics.jsonl"
    )


def test_data_that_teaches_nothing_at_first_is_no_accident(tmp_path: Path, capsys) -> None:
    def accuracy(completions, trainer_state, **kwargs):
        return [float(i % 2) if trainer_state.global_step >= 6 else 0.0 for i in range(len(completions))]

    options = ("max_steps=7", "eval_size=0", "dynamic_sampling.max_waves=1")
    assert qerl.train(tiny_job(tmp_path / "run", *options), reward_funcs=accuracy).steps == 7
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert ["entropy" in line for line in lines] == [False] * 6 + [True]
    assert "in none of 4 groups (drawn in 1 wave) do the rewards vary" in " ".join(capsys.readouterr().err.split())


def test_prompts_that_are_left_out_are_said_once(tmp_path: Path, capsys) -> None:
    def odd(completions, **kwargs):
        return [float(len(text) % 2) for text in completions]

    rows = [{"prompt": "1+1="}, {"prompt": "1+1=" * 40}] * 8
    options = ("max_steps=2", "eval_size=0", "dynamic_sampling.max_waves=1")
    qerl.train(tiny_job(tmp_path / "run", *options), reward_funcs=odd, train_dataset=rows)
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("rows drawn so far are left out: their prompts are empty or longer than max_prompt_length=") == 1


def test_bad_data_is_refused_before_any_work(tmp_path: Path) -> None:
    def mine(completions, **kwargs): ...

    config = tiny_job(tmp_path / "run")
    good = [{"prompt": "1+1="}]
    for train, held_out, message in (
        (iter(good), None, "train_dataset must be a sequence"),
        ([{"question": "x"}], None, "train_dataset needs a `prompt` column"),
        ([*good, {"question": "x"}], None, "train_dataset needs a `prompt` column; row 2 has question"),
        ({"train": good}, None, r"not a dict of train. Of a data set's splits give one, such as data\['train'\]"),
        (good, [{"question": "x"}], "eval_dataset needs a `prompt` column"),
        ([{"prompt": None}], None, "A prompt is a string or a list of messages"),
        ([], None, "no rows"),
        ([{"prompt": ""}], None, "all are empty or longer"),
    ):
        with pytest.raises(ValueError, match=message):
            qerl.train(config, reward_funcs=mine, train_dataset=train, eval_dataset=held_out)
    with pytest.raises(ValueError, match="needs reward_funcs"):
        qerl.train(config, train_dataset=good)

    def strict(completions, solution): ...

    for rows in (good, datasets.Dataset.from_list(good)):
        with pytest.raises(ValueError, match="strict asks for solution"):
            qerl.train(config, reward_funcs=strict, train_dataset=rows)
    trl_config: Any = GRPOConfig(output_dir=str(tmp_path / "trl"), use_cpu=True, bf16=False)
    with pytest.raises(ValueError, match=r"not GRPOConfig\. .* as a dict"):
        qerl.train(trl_config, reward_funcs=strict, train_dataset=good)


def test_bad_settings_are_refused_before_any_work(tmp_path: Path) -> None:
    for override, message in (
        ("temperature=0", "temperature"),
        ("prompts_per_step=5 steps_per_generation=2", "multiple of steps_per_generation"),
        ("max_completion_length=4000", "Write for example max_prompt_length=16 max_completion_length=240"),
        ("task=nothing", "There is no task 'nothing'"),
        ("arithmetic.levels=[9]", "choose one or more of"),
        ("reward_funcs=[nothing]", "no reward 'nothing'"),
        ("dynamic_sampling.metric=nothing", "no reward function 'nothing'"),
        ("noise.profile=[1,1]", "needs 4 factors"),
        ("lora_target_modules=[nothing]", "matches nothing"),
        ("per_device_train_batch_size=8", "prompts_per_step"),
        ("max_steps=0", "nothing to train"),
    ):
        with pytest.raises(ValueError, match=message.replace("[", r"\[")):
            build(tiny_job(tmp_path / "run", *override.split()))
        assert not (tmp_path / "run").exists()


def test_trls_own_reward_functions_and_a_dataset_run_unmodified(
    tmp_path: Path, make_checkpoint: Callable[..., Path], add_tokenizer: Callable[[Path], None], command: Command
) -> None:
    from datasets import Dataset
    from trl.rewards import get_soft_overlong_punishment, think_format_reward

    folder = make_checkpoint("llama", torch.float32)
    add_tokenizer(folder)
    dataset = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"count to {i}"}], "level": i} for i in range(8)]
    )

    def level_reward(completions, level, log_metric, **kwargs):
        log_metric("mean_level", sum(level) / len(level))
        return [None if n % 2 else float(len(c[0]["content"])) for c, n in zip(completions, level, strict=True)]

    result = qerl.train(
        {
            "model": str(folder),
            "base": "bf16",
            "output_dir": str(tmp_path / "run"),
            "max_steps": 2,
            "prompts_per_step": 4,
            "num_generations": 4,
            "max_prompt_length": 60,
            "max_completion_length": 20,
            "learning_rate": 1e-3,
            "dynamic_sampling": {"enabled": False},
            "mask_truncated_completions": False,
        },
        reward_funcs=[think_format_reward, get_soft_overlong_punishment(20, 5), level_reward],
        train_dataset=dataset,
    )
    again = command("train", "--resume", f"output_dir={result.output_dir}", "max_steps=3")
    assert again.returncode == 2
    assert "has its data from Python" in again.stderr
    line = read_metrics(result.output_dir / "metrics.jsonl")[-1]
    assert {"rewards/think_format_reward/mean", "rewards/soft_overlong_punishment_reward/mean"} <= line.keys()
    assert line["mean_level"] >= 0
    assert line["rewards/level_reward/mean"] > 0
    assert line["loss"] != 0


def test_a_run_can_start_from_an_adapter_which_is_then_its_reference(tmp_path: Path) -> None:
    first = qerl.train(tiny_job(tmp_path / "a", "max_steps=2", "eval_size=0"))
    words = (f"init_adapter={first.checkpoint / 'adapter'}", "beta=0.1", "eval_size=0")
    with pytest.raises(ValueError, match="write lora_r=16"):
        build(tiny_job(tmp_path / "b", *words, "lora_r=4"))
    plain = ("max_prompt_length=16", "max_completion_length=64", f"output_dir={tmp_path / 'c'}")
    kept = build(load_config(None, [*plain, *words])).config
    assert (kept.lora_r, kept.lora_alpha, kept.lora_target_modules) == (16, 32.0, "all-linear")
    trainer = build(tiny_job(tmp_path / "b", *words))
    trainer.draw_noise(1)
    samples = train_samples(trainer.config, trainer.roll_out().drawn)
    trainer.updater.score(samples, old=True, reference=True)
    for sample in samples:
        assert torch.equal(sample.old_logp, sample.ref_logp)  # nothing has moved yet
    trainer.update(samples, 1)
    moved = {name: p.detach().clone() for name, p in trained_parameters(trainer.model).items()}
    again = train_samples(trainer.config, trainer.roll_out().drawn)
    trainer.updater.score(again, old=True, reference=True)
    assert any(not torch.equal(sample.old_logp, sample.ref_logp) for sample in again)
    assert all(torch.equal(p, moved[name]) for name, p in trained_parameters(trainer.model).items())
    with pytest.raises(ValueError, match="it is not a PEFT adapter folder"):
        build(tiny_job(tmp_path / "c", f"init_adapter={tmp_path}"))


def test_reward_rises(tmp_path: Path) -> None:
    result = qerl.train(
        load_config(
            default_recipe(),
            ["max_steps=14", "prompts_per_step=8", "eval_size=100", f"output_dir={tmp_path / 'run'}"],
        )
    )
    assert result.after["eval_accuracy"] >= result.before["eval_accuracy"] + 0.2


def test_the_recipe_of_the_default_job_holds_only_what_differs() -> None:
    values = yaml.safe_load(default_recipe().read_text())
    defaults = Config()
    assert {k for k, v in values.items() if getattr(defaults, k) == v} <= {
        "model",
        "base",
        "task",
        "num_generations",
        "prompts_per_step",
    }


@pytest.mark.slow
def test_memory_does_not_climb(tmp_path: Path) -> None:
    """Resident memory over the last 200 of 300 steps."""
    import psutil

    trainer = build(tiny_job(tmp_path / "run", "max_steps=300", "eval_size=0", "save_steps=50"))
    sizes: list[float] = []
    finish = trainer.finish

    def measured(*args):
        finish(*args)
        sizes.append(psutil.Process().memory_info().rss / 1e6)

    trainer.finish = measured
    trainer.train()
    x = torch.arange(200, dtype=torch.float64) - 99.5
    slope = float((x * torch.tensor(sizes[100:], dtype=torch.float64)).sum() / x.square().sum())  # MB a step
    assert slope < 0.05
