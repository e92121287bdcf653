"""Nothing lost: killed runs resume exactly, damage is noticed, nobody writes over anybody."""

import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet
import pytest
import torch

import qerl
from qerl.rl import checkpoint
from qerl.rl.folder import claimed, resumed_config
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


def train_with_kills(folder: Path, phases: Sequence[str], steps: int) -> list[str]:
    """Run to the end, killed once in each phase, in this order; returns the kills that struck before it was done."""
    for seed, phase in enumerate([*phases, NOT_AT_ALL]):
        process = start(folder, phase, seed, f"max_steps={steps}")
        if process.wait() == 0:
            break
        assert process.returncode == -signal.SIGKILL, folder.with_suffix(".log").read_text()
    assert process.returncode == 0
    return folder.with_suffix(".kills").read_text().split()


def assert_same_run(one: Path, other: Path) -> None:
    assert timeless(one / "metrics.jsonl") == timeless(other / "metrics.jsonl")
    tables = [pyarrow.parquet.read_table(run / "completions").sort_by("step").to_pydict() for run in (one, other)]
    assert tables[0] == tables[1]
    newest = [checkpoint.checkpoints(run / "checkpoints")[-1] for run in (one, other)]
    weights = [(path / "adapter" / "adapter_model.safetensors").read_bytes() for path in newest]
    assert weights[0] == weights[1]


def test_a_run_that_is_killed_again_and_again_is_the_run_that_was_not(tmp_path: Path) -> None:
    whole = start(tmp_path / "whole", NOT_AT_ALL, 0, "max_steps=5")
    phases = ["checkpoint", "update"]
    assert train_with_kills(tmp_path / "killed", phases, steps=5) == phases
    assert whole.wait() == 0
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.slow
def test_fifty_kills(tmp_path: Path) -> None:
    phases = [*PHASES * 9, *[ANYWHERE] * 5]
    random.Random(0).shuffle(phases)
    assert start(tmp_path / "whole", NOT_AT_ALL, 0, "max_steps=100").wait() == 0
    assert train_with_kills(tmp_path / "killed", phases, steps=100) == phases
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.parametrize("harm", ["truncated", "flipped", "missing", "extra", "no checksums"])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_taken(tmp_path: Path, harm: str, capsys) -> None:
    options = ("max_steps=3", "save_steps=1", "eval_size=0")
    qerl.train(tiny_job(tmp_path / "a", *options))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    newest = tmp_path / "b" / "checkpoints" / "step-000003"
    weights = newest / "adapter" / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    if harm == "truncated":
        weights.write_bytes(data[:-10])
    elif harm == "flipped":
        data[-5] ^= 1
        weights.write_bytes(data)
    elif harm == "missing":
        (newest / "optimizer.safetensors").unlink()
    elif harm == "extra":
        (newest / "more").write_text("x")
    else:
        (newest / "checksums.json").unlink()
    qerl.train(resumed_config(tmp_path / "b", []), resume=True)
    said = " ".join(capsys.readouterr().err.split())
    assert "step-000003 is damaged" in said
    assert "the one before is taken" in said
    assert_same_run(tmp_path / "a", tmp_path / "b")


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
        options = (*words, "max_steps=3", "eval_size=0")
        qerl.train(tiny_job(tmp_path / f"whole{i}", *options))
        part = tiny_job(tmp_path / f"part{i}", *options, "save_steps=1")
        shutil.rmtree(qerl.train(part).checkpoint)  # as if killed during the third step
        qerl.train(resumed_config(tmp_path / f"part{i}", []), resume=True)
        assert timeless(tmp_path / f"part{i}" / "metrics.jsonl") == timeless(tmp_path / f"whole{i}" / "metrics.jsonl")


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


def test_a_full_disk_leaves_the_checkpoints_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    from safetensors import SafetensorError

    config = tiny_job(tmp_path / "run", "max_steps=3", "save_steps=1", "eval_size=0")
    real, calls = checkpoint.save_file, []

    def full(tensors: dict[str, torch.Tensor], path: Path) -> None:
        calls.append(path)
        if len(calls) == 3:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises((OSError, SafetensorError)):
        qerl.train(config)
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-000001", "step-000002"]
    monkeypatch.undo()
    assert qerl.train(resumed_config(tmp_path / "run", []), resume=True).steps == 3
