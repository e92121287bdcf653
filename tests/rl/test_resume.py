"""Nothing lost: killed runs resume exactly, damage is noticed, nobody writes over anybody."""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

import qerl
from qerl.errors import Interrupted
from qerl.recipe import default_recipe, load_config
from qerl.rl import checkpoint
from qerl.rl.batch import TrainSample
from qerl.rl.folder import claimed, resumed_config
from qerl.rl.run import build
from tests.rl.kills import ANYWHERE, NOT_AT_ALL, PHASES
from tests.rl.test_trainer import few_threads, timeless, tiny_job  # noqa: F401 (a fixture)
from tests.test_cli import qerl_command

WORDS = (
    *("prompts_per_step=4", "num_generations=4", "eval_size=8", "save_steps=2", "save_total_limit=2"),
    *("steps_per_generation=2", "num_iterations=2", "noise.schedule=entropy", "eval_steps=3"),
    "reward_funcs=[tests.rl.kills.accuracy]",
)


def start(folder: Path, phase: str, seed: int, *words: str) -> subprocess.Popen[str]:
    """The run in a process of its own, begun or resumed, to be killed in a phase; kills are noted beside the folder."""
    going = ["--resume"] if (folder / "config.yaml").exists() else [*WORDS, *words]
    line = ["-m", "tests.rl.kills", phase, seed, folder.with_suffix(".kills"), "train", f"output_dir={folder}", *going]
    log = open(folder.with_suffix(".log"), "a")  # noqa: SIM115 (the process writes to it)
    return subprocess.Popen([sys.executable, *map(str, line)], stdout=log, stderr=log, text=True)


def kill_again_and_again(folder: Path, phases: Sequence[str], *words: str) -> list[str]:
    """Begin and resume a run, killed once in each phase, in this order; returns the kills that struck before its
    end."""
    for seed, phase in enumerate(phases):
        process = start(folder, phase, seed, *words)
        if process.wait() == 0:
            break
        assert process.returncode == -signal.SIGKILL, folder.with_suffix(".log").read_text()
    return folder.with_suffix(".kills").read_text().split()


def assert_same_run(one: Path, other: Path) -> None:
    assert timeless(one / "metrics.jsonl") == timeless(other / "metrics.jsonl")
    tables = [pyarrow.parquet.read_table(run / "completions").sort_by("step").to_pydict() for run in (one, other)]
    assert tables[0] == tables[1]
    newest = [checkpoint.checkpoints(run / "checkpoints")[-1] for run in (one, other)]
    weights = [(path / "adapter" / "adapter_model.safetensors").read_bytes() for path in newest]
    assert weights[0] == weights[1]


def test_a_run_that_is_killed_while_a_checkpoint_is_written_is_the_run_that_was_not(tmp_path: Path) -> None:
    words = ("max_steps=3", "save_steps=1", "prompts_per_step=2", "eval_size=2")
    killed = start(tmp_path / "killed", "checkpoint:2", 0, *words)
    qerl.train(load_config(default_recipe(), [*WORDS, *words, f"output_dir={tmp_path / 'whole'}"]))
    assert killed.wait() == -signal.SIGKILL
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "killed" / "checkpoints")] == ["step-000001"]
    qerl.train(resumed_config(tmp_path / "killed", []), resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.slow
def test_fifty_kills(tmp_path: Path) -> None:
    phases = [*PHASES * 9, *[ANYWHERE] * 5]
    random.Random(0).shuffle(phases)
    assert start(tmp_path / "whole", NOT_AT_ALL, 0, "max_steps=100").wait() == 0
    assert kill_again_and_again(tmp_path / "killed", phases, "max_steps=100") == phases
    assert start(tmp_path / "killed", NOT_AT_ALL, 0).wait() == 0
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_taken(tmp_path: Path, capsys) -> None:
    qerl.train(tiny_job(tmp_path / "a", "max_steps=3", "save_steps=1", "eval_size=0"))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    newest = tmp_path / "b" / "checkpoints" / "step-000003"
    weights = newest / "adapter" / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    qerl.train(resumed_config(tmp_path / "b", []), resume=True)
    said = " ".join(capsys.readouterr().err.split())
    assert "step-000003 is damaged" in said
    assert "the one before is taken" in said
    assert_same_run(tmp_path / "a", tmp_path / "b")
    for harm in ("truncated", "missing", "extra", "no checksums"):
        harmed = shutil.copytree(tmp_path / "a" / "checkpoints" / "step-000003", tmp_path / harm)
        assert not checkpoint.damage(harmed)
        if harm == "truncated":
            os.truncate(harmed / "adapter" / "adapter_model.safetensors", len(data) - 10)
        elif harm == "missing":
            (harmed / "optimizer.safetensors").unlink()
        elif harm == "extra":
            (harmed / "more").write_text("x")
        else:
            (harmed / "checksums.json").unlink()
        assert checkpoint.damage(harmed), harm


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_over_unasked(tmp_path: Path, capsys) -> None:
    result = qerl.train(tiny_job(tmp_path / "a", "max_steps=1", "eval_size=0", "prompts_per_step=2"))
    written = (tmp_path / "a" / "metrics.jsonl").read_bytes()
    (result.checkpoint / "checksums.json").unlink()
    for _ in range(2):
        with pytest.raises(ValueError, match="No whole checkpoint is left"):
            qerl.train(resumed_config(tmp_path / "a", []), resume=True)
    assert "put aside as damaged-step-000001, none is left" in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "a" / "metrics.jsonl").read_bytes() == written
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    assert qerl.train(resumed_config(tmp_path / "a", ["max_steps=1"]), resume=True).steps == 1
    capsys.readouterr()
    qerl.train(resumed_config(tmp_path / "a", []), resume=True)
    said = capsys.readouterr().err
    assert "Going on after step 1 of 1." in said
    assert "Trying" not in said, "there is nothing left to try it for"


def test_full_training_and_eight_bit_adamw_resume_exactly(tmp_path: Path) -> None:
    for i, words in enumerate((["base=full"], ["optim=adamw_8bit"])):
        run = tmp_path / f"run{i}"
        done = qerl.train(tiny_job(run, *words, "max_steps=2", "prompts_per_step=2", "eval_size=0", "save_steps=1"))
        whole = timeless(run / "metrics.jsonl")
        shutil.rmtree(done.checkpoint)  # as if killed during the second step
        qerl.train(resumed_config(run, []), resume=True)
        assert timeless(run / "metrics.jsonl") == whole


def test_an_evaluation_after_a_checkpoint_of_its_step_is_there_once(tmp_path: Path) -> None:
    """Stopped after the update of step 1, before its evaluation; resumed, and killed after that evaluation."""
    options = ("max_steps=2", "save_steps=1", "eval_steps=1", "eval_size=2", "prompts_per_step=2")
    qerl.train(tiny_job(tmp_path / "a", *options))
    trainer = build(tiny_job(tmp_path / "b", *options))
    update = trainer.update

    def stop(samples: list[TrainSample], step: int) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return update(samples, step)

    trainer.update = stop
    with trainer.metrics, pytest.raises(Interrupted):
        trainer.train()
    qerl.train(resumed_config(tmp_path / "b", []), resume=True)
    shutil.rmtree(tmp_path / "b" / "checkpoints" / "step-000002")
    qerl.train(resumed_config(tmp_path / "b", []), resume=True)
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_an_interruption_in_the_last_update_loses_nothing(tmp_path: Path) -> None:
    trainer = build(tiny_job(tmp_path / "run", "max_steps=1", "eval_size=0", "prompts_per_step=2"))
    update = trainer.update

    def stop(samples: list[TrainSample], step: int) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return update(samples, step)

    trainer.update = stop
    with trainer.metrics, pytest.raises(Interrupted, match="Stopped after step 1 of 1"):
        trainer.train()
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "run" / "checkpoints")] == ["step-000001"]


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    result = qerl.train(tiny_job(tmp_path / "a", "max_steps=1", "eval_size=0"))
    kinds = {path.suffix for path in result.output_dir.rglob("*") if path.is_file()}
    assert kinds == {".jsonl", ".yaml", ".parquet", ".safetensors", ".json", ".png", ".md"}


def test_a_second_process_and_a_folder_that_cant_be_written_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with claimed(folder, resume=False):
        (folder / "checkpoints").mkdir()
        done = qerl_command("train", f"output_dir={folder}", "max_steps=1", "eval_size=0")
        assert done.returncode == 2
        assert "Another process is at work" in " ".join(done.stderr.split())
    with pytest.raises(ValueError, match="Can't write /proc"), claimed(Path("/proc"), resume=False):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="Can't write"):
        qerl.train(tiny_job(tmp_path / "file" / "run"))
    assert not (tmp_path / "never").exists()
    with pytest.raises(ValueError, match="There is no task"):
        qerl.train(tiny_job(tmp_path / "never", "task=nothing"))
    assert not (tmp_path / "never").exists()


def test_a_full_disk_leaves_the_checkpoints_that_are_there(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the library meets a real error of the system."""
    trainer = build(tiny_job(tmp_path / "run", "max_steps=3", "save_steps=1", "eval_size=0", "prompts_per_step=2"))
    write_down, limits = trainer.write_down, resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(step: int, *arguments: Any) -> None:
        write_down(step, *arguments)
        if step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))

    trainer.write_down = fill
    try:
        with trainer.metrics, pytest.raises(OSError, match=r"File too large.*step-000002"):
            trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]
    assert qerl.train(resumed_config(tmp_path / "run", []), resume=True).steps == 3


def test_what_a_kill_left_of_a_checkpoint_is_cleared_away(tmp_path: Path) -> None:
    result = qerl.train(tiny_job(tmp_path / "run", "max_steps=1", "eval_size=0", "prompts_per_step=2"))
    folder = result.checkpoint.parent
    for name in (".step-000001.partial", ".step-000000.old"):
        shutil.copytree(result.checkpoint, folder / name)
    qerl.train(resumed_config(tmp_path / "run", ["max_steps=2"]), resume=True)
    assert sorted(path.name for path in folder.iterdir()) == ["step-000001", "step-000002"]
