"""The study's page says what its results say, and its recipes and scripts are sound."""

import hashlib
import importlib
import json
import re
import shlex
from pathlib import Path

import pytest

import qerl
from qerl.cli.words import split_words
from qerl.compare.runs import Run
from qerl.recipe import load_config, settings
from qerl.sweep.grid import make_grid
from qerl.tasks.task import task_named

ROOT = Path(__file__).parent.parent
STUDY = ROOT / "benchmarks" / "study"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    """Imports a script of the study by its name."""
    monkeypatch.syspath_prepend(str(STUDY))

    return importlib.import_module


def test_the_page_has_the_tables_that_the_results_give(script) -> None:
    tables = script("tables")
    page = tables.PAGE.read_text()
    assert tables.filled(page, tables.tables()) == page  # else: python benchmarks/study/tables.py
    with pytest.raises(ValueError, match="differ in"):
        tables.filled(page, {"another": ""})


def test_results_are_small_and_name_no_folder(script) -> None:
    assert sum(file.stat().st_size for file in (STUDY / "results").iterdir()) < 2_000_000
    settings = [run.settings for run in script("measures").read_runs(STUDY / "results" / "tiny.jsonl.xz")]
    assert settings
    assert not any(str(value).startswith("/") for one in settings for value in one.values())


def test_intervals_are_students_and_pairs_go_by_seed(script) -> None:
    measures = script("measures")
    middle, half = measures.interval([1.0, 2.0, 3.0])
    assert (middle, half) == (2.0, pytest.approx(2.4841, abs=1e-3))  # 4.303 / sqrt 3
    assert measures.interval([1.0]) is None
    assert [measures.students(n) for n in (4, 20, 40)] == pytest.approx([2.776, 2.086, 2.021], abs=1e-3)

    def run(seed: int, reward: float):
        return measures.Run("", {"seed": seed}, None, [{"reward": reward}, {"reward": None}], [])

    found = measures.paired([run(1, 0.5), run(0, 0.25)], [run(0, 0.0), run(1, 0.25), run(2, 9.0)], _reward)
    assert found == [0.25, 0.25]


def test_of_one_seed_there_is_a_difference_but_no_interval(script) -> None:
    measures, arms = script("measures"), {name: {"arm": name} for name in "abc"}

    def run(arm: str, seed: int, reward: float):
        return measures.Run("", {"arm": arm, "seed": seed}, None, [{"reward": reward}], [])

    runs = [run("a", 0, 0.5), run("a", 1, 1.0), run("b", 0, 0.25), run("b", 2, 9.0), run("c", 0, 1.0), run("c", 1, 1.0)]
    table = script("tables").differences_table(runs, arms, [("a", "b"), ("a", "c")], {"reward": (_reward, ".2f")})
    assert "| a less b | +0.25 (1) |" in table
    assert "| a less c | -0.25 ± 3.18 (2) |" in table


def _reward(run) -> float:
    return run.over_all("reward")


@pytest.mark.parametrize("name", ["tiny", "gsm8k"])
def test_the_recipes_are_short_and_the_readmes_sweeps_are_grids_of_them(name: str) -> None:
    path = STUDY / f"{name}.yaml"
    assert len(path.read_text().splitlines()) < 30
    text = (STUDY / "README.md").read_text().replace("\\\n", " ")
    commands = re.findall(rf"^qerl sweep benchmarks/study/{name}\.yaml (.*)$", text, re.MULTILINE)
    assert commands
    for command in commands:
        assert make_grid(path, split_words(shlex.split(command))[1]).points


def test_the_readmes_arms_are_those_of_the_135ms_tables(script) -> None:
    ablations = script("ablations")
    wanted = [arm for arms in vars(ablations).values() if isinstance(arms, dict) for arm in arms.values()]
    wanted = [arm for arm in wanted if isinstance(arm, dict)]
    lines = re.findall(r"^arm \S+ (.*)$", (STUDY / "README.md").read_text(), re.MULTILINE)
    made = [load_config(STUDY / "sums.yaml", shlex.split(line)) for line in lines]
    found = [{entry.key: entry.value for entry in settings(config)} for config in made]
    for arm in wanted:
        assert any(all(run[key] == value for key, value in arm.items()) for run in found), arm
    for run in found:
        assert any(all(run[key] == value for key, value in arm.items()) for arm in wanted), run


def test_the_sums_are_a_task_with_held_out_questions(script, tmp_path: Path) -> None:
    script("sums").write_sums(tmp_path)
    task = task_named(load_config(STUDY / "sums.yaml", [f"data_dir={tmp_path}"]))
    asked = {row["question"] for row in task.train}
    assert (len(asked), len(task.test)) == (9000, 1000)
    assert not any(row["question"] in asked for row in task.test)
    numbers = [int(n) for n in re.findall(r"\d+", task.test[0]["question"])]
    assert int(task.test[0]["answer"]) == sum(numbers)


def test_finished_runs_are_sampled_eight_times_a_question(
    script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script("sums").write_sums(tmp_path / "sums")
    words = [
        *("model=tiny", "device=cpu", f"data_dir={tmp_path / 'sums'}", f"output_dir={tmp_path / 'runs' / 'one'}"),
        *("max_steps=1", "eval_size=0", "prompts_per_step=2", "num_generations=2", "max_completion_length=8"),
    ]
    qerl.train(load_config(STUDY / "sums.yaml", words))
    for folder in ("runs", "runs/one"):  # what is complete is not done again
        monkeypatch.setattr("sys.argv", ["evaluate.py", str(tmp_path / folder), "--limit", "2"])
        script("evaluate").main()
    results = json.loads((tmp_path / "runs" / "one" / "pass8-first-2" / "results.json").read_text())
    assert results["tasks"]["gsm8k"].keys() >= {"pass@1", "pass@8", "maj@8"}
    assert not (tmp_path / "runs" / "one" / "pass8").exists()  # which would count as all questions'
    said = [line.split()[:2] for line in capsys.readouterr().out.splitlines() if line.startswith("one ")]
    assert said == [["one", '{"questions":'], ["one", "is"]]
    monkeypatch.setattr("sys.argv", ["evaluate.py", str(tmp_path / "sums")])
    with pytest.raises(SystemExit):
        script("evaluate").main()
    assert "no finished LoRA run is there" in capsys.readouterr().err


def test_pieces_are_joined_in_order(script, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode() * 3)
    digest = script("weights").join([tmp_path / "a", tmp_path / "b"], tmp_path / "whole")
    assert (tmp_path / "whole").read_bytes() == b"aaabbb"
    assert digest == hashlib.sha256(b"aaabbb").hexdigest()


def test_runs_of_another_length_and_runs_that_are_there_twice_are_refused(script) -> None:
    def header(name: str, **changed: object):
        return {"run": name, "settings": {"model": "tiny", "task": "sums", "max_steps": 20, "seed": 0} | changed}

    require = script("collect").require_one_study
    require([header("a/0"), {"run": "a/0", "step": 1}, header("a/1", seed=1)])
    with pytest.raises(ValueError, match="b/1 has max_steps=12, others 20"):
        require([header("a/0"), header("b/1", max_steps=12)])
    with pytest.raises(ValueError, match="a/0 and b/0 have the same settings"):
        require([header("a/0"), header("b/0")])


def test_entropies_that_can_not_be_had_leave_earlier_ones_alone(
    script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "entropy.jsonl.xz"
    script("measures").write_lines(out, [{"format": "bf16"}])
    monkeypatch.setattr("sys.argv", ["entropy.py", str(out), "--model", str(tmp_path / "none")])
    with pytest.raises(ValueError, match="There is no folder"):
        script("entropy").main()
    assert script("measures").read_lines(out) == [{"format": "bf16"}]
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_a_collected_run_reads_back_as_it_was_without_its_folders(script, tmp_path: Path) -> None:
    lines = [{"step": 0, "eval_reward": 0.5}, {"step": 1, "reward": 0.25}]
    settings = {"seed": 3, "model": "/weights/small", "output_dir": "/runs/one", "data_dir": None, "base": "nf4"}
    path = tmp_path / "runs.jsonl.xz"
    script("measures").write_lines(path, script("collect").run_lines(Run(tmp_path / "one", settings, lines), None))
    (run,) = script("measures").read_runs(path)
    assert run.settings == {"seed": 3, "model": "small", "base": "nf4"}
    assert (run.seed, run.steps, run.evals) == (3, lines[1:], lines[:1])
    kept, count = script("collect").merged(path, [{"run": "other", "settings": {}}])
    assert (count, [line["run"] for line in kept]) == (1, [f"{tmp_path.name}/one"] * 3 + ["other"])
    assert script("collect").merged(path, kept[:1]) == (kept[:1], 0)  # a run that comes again replaces its lines
