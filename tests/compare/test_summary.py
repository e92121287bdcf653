"""Runs of the same settings become one curve; what is missing, unfinished or of another length is said."""

import json
from pathlib import Path

import pytest
import yaml

from qerl.cli.compare import compare as command
from qerl.compare.curves import band, curve, seconds_of
from qerl.compare.runs import group_runs, read_runs
from qerl.compare.summary import compare
from qerl.console import screen
from qerl.recipe import default_recipe, load_config
from qerl.rl.folder import write_config


def write_run(folder: Path, rewards: list[float | None], *overrides: str, pause: float = 0.0) -> Path:
    """A run's folder with these rewards, two seconds a step, and an evaluation at its end."""
    folder.mkdir(parents=True)
    words = [f"max_steps={len(rewards)}", *overrides, f"output_dir={folder}"]
    write_config(load_config(default_recipe(), words), folder)
    lines = [
        {"step": i, "time": 100.0 + 2 * i + pause * (i > 1), "reward": reward, "entropy": 0.5, "step_time": 2.0}
        for i, reward in enumerate(rewards, 1)
    ]
    lines.append({"step": len(rewards), "time": 200.0, "eval_accuracy": 0.75, "eval_runtime": 1.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_seeds_are_averaged_and_settings_that_differ_name_the_curves(tmp_path: Path) -> None:
    off = [write_run(tmp_path / f"off{s}", [0.0, s], f"seed={s}", "noise.schedule=off") for s in (1, 3)]
    on = [write_run(tmp_path / f"on{s}", [0.0, 5.0], f"seed={s}", "save_steps=9") for s in (1, 2)]
    made = compare([*off, *on], tmp_path / "out")
    assert [group.label for group in made.groups] == ["noise.schedule=off", "noise.schedule=exponential"]
    assert made.groups[0].seeds == [1, 3]
    first = made.values["noise.schedule=off"]["reward"]
    assert first is not None
    assert (first.mean, first.low, first.high, first.runs) == (2.0, 1.0, 3.0, 2)
    assert first.std == pytest.approx(2**0.5)
    assert made.values["noise.schedule=off"]["accuracy"] is None  # nobody measured it
    assert made.values["noise.schedule=off"]["held-out accuracy"].mean == 0.75  # type: ignore[union-attr]
    assert made.values["noise.schedule=off"]["seconds"].mean == 5.0  # type: ignore[union-attr]
    assert made.notes == []
    for name in ("by_step.png", "by_seconds.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "out" / "comparison.json").read_text())["groups"][0]["seeds"] == [1, 3]


def test_a_band_covers_what_all_runs_reached(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.0, 1.0, 2.0], "max_steps=3")
    write_run(tmp_path / "b", [2.0, None], "max_steps=3", "seed=1")
    runs = read_runs([tmp_path])
    curves = [curve(run, "reward", "step") for run in runs]
    together = band(curves, "step")
    assert together is not None
    assert (together.x.tolist(), together.mean.tolist()) == ([1.0], [1.0])
    assert (together.low.tolist(), together.high.tolist()) == ([0.0], [2.0])
    assert band([curve(run, "accuracy", "step") for run in runs], "step") is None
    made = compare([tmp_path], tmp_path / "out")
    assert any("b is unfinished: step 2 of 3" in note for note in made.notes)
    assert any("different lengths" in note for note in made.notes)
    # Steps that all reached: 1 and 2, of which b has only the first.
    assert made.values["all runs"]["reward"].mean == 1.5  # type: ignore[union-attr]


def test_over_seconds_runs_of_another_speed_are_interpolated(tmp_path: Path) -> None:
    slow, fast = (write_run(tmp_path / name, [0.0, 1.0, 2.0]) for name in ("slow", "fast"))
    lines = [json.loads(line) for line in (fast / "metrics.jsonl").read_text().splitlines()]
    quick = [line | ({"step_time": 1.0} if "step_time" in line else {}) for line in lines]
    (fast / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in quick))
    together = band([curve(run, "reward", "seconds") for run in read_runs([slow, fast])], "seconds")
    assert together is not None
    assert (together.x[0], together.x[-1]) == (2.0, 3.0)  # the slow one's first step, the fast one's last
    assert together.low[-1] == pytest.approx(0.5)
    assert together.high[-1] == pytest.approx(2.0)


def test_pauses_of_a_resumed_run_are_not_counted(tmp_path: Path) -> None:
    run = read_runs([write_run(tmp_path / "run", [0.0, 1.0], pause=3600.0)])[0]
    assert seconds_of(run) == [2.0, 4.0, 5.0]


def test_runs_of_another_version_are_read_and_many_differences_give_way_to_the_folder(tmp_path: Path) -> None:
    write_run(tmp_path / "new", [1.0])
    old = write_run(tmp_path / "old", [1.0])
    stored = yaml.safe_load((old / "config.yaml").read_text())
    del stored["temperature"]  # a setting that did not exist yet, and one that no longer does
    (old / "config.yaml").write_text(yaml.safe_dump(stored | {"gone": 1, "lora_r": 8, "beta": 0.1, "top_k": 5}))
    groups = group_runs(read_runs([tmp_path]))
    assert [group.label for group in groups] == ["new", "old"]
    assert set(groups[0].settings) == {"gone", "lora_r", "beta", "top_k"}


def test_a_damaged_run_is_named_by_its_line_and_left_out(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "whole", [1.0])
    broken = write_run(tmp_path / "runs" / "broken", [1.0, 2.0])
    lines = (broken / "metrics.jsonl").read_text().splitlines(keepends=True)
    (broken / "metrics.jsonl").write_text("".join([lines[0], '{"step": \n', *lines[2:]]))
    made = compare([tmp_path / "runs"], tmp_path / "out")
    assert [group.label for group in made.groups] == ["whole"]
    assert "Line 2 of" in made.notes[0]
    assert made.notes[0].endswith("It is left out.")
    with pytest.raises(ValueError, match=r"Nothing to compare yet: .*Line 2 of"):
        compare([broken], tmp_path / "out")
    for text in ("[1]\n", '{"loss": 1}\n'):
        (broken / "metrics.jsonl").write_text(text)
        with pytest.raises(ValueError, match="has lines that are no metrics of a step"):
            compare([broken], tmp_path / "out")


def test_held_out_accuracy_is_shown_whole_on_a_narrow_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "_width", 80)
    for seed, schedule in ((0, "off"), (1, "off"), (0, "exponential")):
        words = (f"seed={seed}", f"noise.schedule={schedule}", f"learning_rate={3.25e-5 * (schedule == 'off') + 1e-5}")
        folder = write_run(tmp_path / "runs" / f"{schedule}{seed}", [0.123, 0.456], *words)
        more = {"accuracy": 0.1234 + seed / 70, "eval_reward": 0.12345, "eval_accuracy": 0.8126 + seed / 7}
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": 2, "time": 300.0} | more) + "\n")
    command([tmp_path / "runs"], tmp_path / "out")
    shown = capsys.readouterr().out
    assert "…" not in shown
    cells = [[cell.strip() for cell in line.split("│")] for line in shown.splitlines() if line.startswith("│")]
    assert cells[0][4] == "0.813"  # runs, seeds, steps, then what matters most
    assert {"0.884", "±0.1"} <= {row[4] for row in cells}


def test_the_command_ends_in_json_and_says_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs" / "a", [1.0])
    (tmp_path / "runs" / "b").mkdir()
    command([tmp_path / "runs"], tmp_path / "out")
    shown = capsys.readouterr().out
    assert "What was learnt" in shown
    assert all(line.rstrip().endswith(("│", "┃", "┓", "┩", "┘")) for line in shown.splitlines() if line[:1] in "│┃")
    assert json.loads(shown.splitlines()[-1])["groups"][0]["values"]["reward"]["mean"] == 1.0
    with pytest.raises(ValueError, match="holds no run"):
        command([tmp_path / "runs" / "b"], tmp_path / "out")
