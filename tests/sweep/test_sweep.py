"""A sweep outlives its runs' failures, goes on where it stopped, and ends in a comparison."""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest
import typer

from qerl.cli.sweep import sweep
from qerl.config import ConfigError
from qerl.errors import Interrupted
from qerl.recipe import default_recipe
from qerl.sweep.grid import Point, make_grid
from qerl.sweep.sweep import LISTING, last_result, read_outcomes, run_sweep, train_command

SMALL = ("prompts_per_step=4", "num_generations=4", "eval_size=0", "max_steps=1", "save_steps=1")


def test_a_failing_run_is_reported_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"model=tiny,{tmp_path}/none", *SMALL, f"output_dir={tmp_path / 'sweep'}"]
    with pytest.raises(ValueError, match="For another model or task name a recipe"):
        sweep(words)
    with pytest.raises(typer.Exit):
        sweep([str(default_recipe()), *words])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["runs"], result["done"]) == (2, 1)
    ((name, reason),) = result["failed"].items()
    assert "There is no folder" in reason
    assert result["groups"][0]["steps"] == [1]
    assert (tmp_path / "sweep" / "comparison" / "by_step.png").is_file()
    listed = {run["name"]: run for run in json.loads((tmp_path / "sweep" / LISTING).read_text())["runs"]}
    assert listed.pop(name)["status"] == "failed"
    (good,) = listed.values()
    assert (good["status"], good["result"]["steps"]) == ("done", 1)
    # The same command would skip the finished run and try the other again; a longer one goes on with the finished run.
    grid = make_grid(default_recipe(), words)
    assert [outcome.status for outcome in read_outcomes(grid)] == ["done", "waiting"]
    assert train_command(grid, grid.points[1])[1] == str(default_recipe())
    longer = make_grid(default_recipe(), [word.replace("max_steps=1", "max_steps=2") for word in words])
    assert read_outcomes(longer)[0].status == "waiting"
    assert train_command(longer, longer.points[0])[:2] == ["train", "--resume"]
    assert "max_steps=2" in train_command(longer, longer.points[0])
    # A shorter one would leave runs of two lengths.
    (tmp_path / "sweep" / good["name"] / "metrics.jsonl").write_text('{"step": 3}\n')
    with pytest.raises(ConfigError, match="has 3 steps, more than max_steps=2"):
        read_outcomes(longer)
    # Other settings in the same folder are another sweep.
    with pytest.raises(ConfigError, match="was begun with other settings"):
        read_outcomes(make_grid(default_recipe(), [*words, "lora_r=4"]))


def test_ctrl_c_is_handed_on_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    words = [*SMALL[:-2], "max_steps=400", f"output_dir={tmp_path}"]
    grid = make_grid(default_recipe(), words)

    pressed = []

    def interrupt(number: int, point: Point, line: dict[str, Any] | None) -> None:
        if not pressed:
            pressed.append(line)
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match=r"saved what it had\. Run the same command again to go on"):
        run_sweep(grid, interrupt)
    folder = tmp_path / grid.points[0].name
    assert 0 < len((folder / "metrics.jsonl").read_text().splitlines()) < 400
    assert list((folder / "checkpoints").iterdir())  # it saved itself
    assert read_outcomes(grid)[0].status == "waiting"
    assert train_command(grid, grid.points[0])[:2] == ["train", "--resume"]


def test_what_libraries_say_after_the_result_does_not_hide_it() -> None:
    assert last_result('step 1\n{"steps": 1}\nwandb: synced\n') == {"steps": 1}
    assert last_result('{"steps": 2}\n{"cut short\n') == {"steps": 2}
    assert last_result("killed by nobody") is None


def test_two_sweeps_do_not_share_a_folder_and_a_run_is_no_sweep(tmp_path: Path) -> None:
    grid = make_grid(default_recipe(), [f"output_dir={tmp_path}"])
    lock = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="Another sweep is at work"):
            run_sweep(grid)
    finally:
        os.close(lock)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="holds a run itself"):
        run_sweep(grid)
