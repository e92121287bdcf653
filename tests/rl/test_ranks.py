"""Several processes do the run that one does: two ranks by torchrun, with gloo, on the CPU."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from safetensors.torch import load_file

import qerl
from qerl.cli import app
from qerl.recipe import default_recipe, load_config
from qerl.rl import checkpoint
from qerl.rl.folder import resumed_config
from qerl.rl.guard import Interrupts
from qerl.rl.ranks import Ranks, balanced
from tests.rl.test_trainer import few_threads, timeless, tiny_job  # noqa: F401 (a fixture)

# Steps are cut into two updates and gone over twice, with a batch-wide scale, a reference, and noise by the entropy.
# AdamW with so large an epsilon is nearly SGD: a wrong factor on the gradient shows, and rounding is not blown up.
WORDS = (
    *("max_steps=2", "prompts_per_step=4", "num_generations=4", "eval_size=5", "eval_steps=100", "beta=0.01"),
    *("steps_per_generation=2", "num_iterations=2", "noise.schedule=entropy", "scale_rewards=batch"),
    *("adam_epsilon=1", "learning_rate=1", "reward_funcs=[tests.rl.ranks_job.accuracy]"),
)
NEAR = {"rel": 1e-4, "abs": 1e-4}  # what comes of float32 and of differences of log-probs


def in_two_ranks(folder: Path, *commands: str) -> tuple[subprocess.CompletedProcess[str], list[list[Any]]]:
    """The commands one after another; the statuses that each rank ended them with."""
    line = ["-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "tests.rl.ranks_job", str(folder), *commands]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *line], env=environment, capture_output=True, text=True, check=False)
    found = [folder / f"{rank}.json" for rank in range(2)]
    assert all(path.exists() for path in found), done.stderr
    return done, [json.loads(path.read_text()) for path in found]


def assert_same_run(one: Path, other: Path) -> None:
    """To float precision; what was drawn, exactly."""
    lines = [timeless(run / "metrics.jsonl") for run in (one, other)]
    assert [line.keys() for line in lines[0]] == [line.keys() for line in lines[1]]
    for line, there in zip(*lines, strict=True):
        assert line == pytest.approx(there, **NEAR)
    tables = [pyarrow.parquet.read_table(run / "completions").sort_by("step").to_pydict() for run in (one, other)]
    assert tables[0].pop("advantage") == pytest.approx(tables[1].pop("advantage"))
    assert tables[0] == tables[1]
    newest = [checkpoint.checkpoints(run / "checkpoints")[-1] for run in (one, other)]
    weights = [load_file(path / "adapter" / "adapter_model.safetensors") for path in newest]
    assert weights[0].keys() == weights[1].keys()
    error = sum(float((weights[0][name] - weights[1][name]).square().sum()) for name in weights[0]) ** 0.5
    moved = sum(float(weights[0][name].square().sum()) for name in weights[0] if "lora_B" in name) ** 0.5  # from 0
    assert error < 1e-5 * moved


def test_two_ranks_do_the_run_of_one_whatever_befalls_one_of_them(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    done, (first, second) = in_two_ranks(
        tmp_path,
        f"raise:1 train output_dir={two} {' '.join(WORDS)}",
        f"interrupt:1 train --resume output_dir={two}",
        f"none train --resume output_dir={two}",
        f"die:2 train --resume output_dir={two} max_steps=3",
    )
    said = " ".join(done.stderr.split())
    # What one rank raises ends both, by its error; a signal to one stops both after the same step.
    assert (first, second) == ([1, 130, 0], [2, 130, 0])
    assert "Reward function accuracy raised RuntimeError: the judge is gone" in said
    assert "Rank 1 failed, and the run with it: Reward function accuracy raised" in said
    assert "Stopped after step 1 of 2. To go on: torchrun --nproc-per-node 2 -m qerl train --resume" in said
    # One that dies ends the job.
    assert done.returncode != 0
    assert "Another rank has ended, and the run with it" in said
    # Rank 0 alone speaks.
    assert len([line for line in done.stdout.splitlines() if line.startswith("{")]) == 1
    assert said.count("Plan: 2 steps") == 3
    assert "on each of 2 ranks, which take 2 prompts a step" in said
    # No step was lost, and it is the run of one process; which can go on with what two have begun.
    qerl.train(load_config(default_recipe(), [*WORDS, f"output_dir={one}"]))
    for run in (one, two):
        qerl.train(resumed_config(run, ["max_steps=3"]), resume=True)
    waves = [line["dynamic_sampling/waves"] for line in timeless(one / "metrics.jsonl") if "loss" in line]
    assert max(waves[:2]) > 1
    assert_same_run(one, two)


def test_what_ranks_cant_do_is_refused_before_they_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = {"RANK": 1, "WORLD_SIZE": 3, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 3, "TORCHELASTIC_RUN_ID": "none"}
    for name, value in launch.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ValueError, match=r"prompts_per_step=4 can't be shared equally by 3 ranks.*=3"):
        qerl.train(tiny_job(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="qerl config is one process: start it without torchrun"):
        app(["config"], standalone_mode=False)


def test_shares_are_the_whole_and_about_as_large() -> None:
    for count in (0, 1, 5, 8):
        parts = [Ranks(rank, 3).share(range(count)) for rank in range(3)]
        assert [i for part in parts for i in part] == list(range(count))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert balanced([9, 1, 1, 8, 7], 2) == [[0, 1, 2], [3, 4]]
    assert balanced([5], 3) == [[0], [], []]
    assert balanced([], 2) == [[], []]


def test_one_of_several_stops_between_meetings_only() -> None:
    with Interrupts(several=True) as interrupts:
        with interrupts.shield("the update is done"):
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), interrupts.own_work():
            raise AssertionError("it was asked to stop")
        with pytest.raises(KeyboardInterrupt), interrupts.own_work():
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # noted
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
