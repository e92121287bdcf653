"""What `qerl bench` shows of its rows, whatever ends it, and what it refuses before any work."""

import csv
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from rich.console import Console

from qerl.bench import formats
from qerl.cli.measured import measured, table, turned_tables
from tests.conftest import Command

MANY = "bench rollout --batch 1,2,3,4,5,6,7,8,9 --base bf16 --rank 0 --prompt 4 --device cpu --max-tokens 6"


COMMANDS = (
    "quantize",
    "rollout",
    "rollout --batch 1",
    "linear",
    "prefill",
    "startup",
    "logprobs",
    "step",
    "step --tokens 9",
)


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path) as file:
        return list(csv.DictReader(file))


def test_rows_of_rollouts_are_readable_at_80_columns(command: Command) -> None:
    row = {"model": "qwen2.5-32b", "base": "bitsandbytes", "rank": 128, "batch": 256, "new_tokens": 8192,
           "prefill_ms": 12345.6, "step_ms": 123.456, "tokens_per_s": 12345.6, "of_floor": 0.55}  # fmt: skip
    console = Console(width=80)
    with console.capture() as shown:
        console.print(table([row], tuple(row), "A title"))
    assert shown.get().splitlines()[-1].split() == [str(value) for value in row.values()]
    done = command(*["bench", "rollout", "--batch", "1", "--prompt", "4", "--device", "cpu", "--max-tokens", "2"])
    first, second, _, line, result = done.stdout.splitlines()[1:]
    assert first.split() == ["new", "prefill", "step", "tokens"]  # no "of floor", an H200's: empty on a CPU
    assert second.split()[:5] == ["model", "base", "rank", "batch", "tokens"]
    assert line.split()[:5] == ["toy", "nvfp4", "32", "1", "2"]
    (found,) = json.loads(result)["rows"]
    assert found["of_floor"] is None
    assert (found["timed"], found["prompt"]) == ("every step", 4)


def test_figures_of_many_rows_are_tables_one_under_another_and_nothing_is_cut() -> None:
    rows = [{"shape": "qwen2.5-7b", "base": base, "running": running, "step_s": f"{base}{running:.4f}", "none": None}
            for base in ("bf16", "bitsandbytes", "nvfp4") for running in (8, 32, 128)]  # fmt: skip
    console = Console(width=80)
    made = turned_tables(rows, tuple(rows[0]), "A title", 3, console)
    with console.capture() as shown:
        console.print(*made)
    lines = [line.split() for line in shown.get().splitlines()]
    assert shown.get().count("A title") == 1 < len(made) < 5
    assert len({name for line in lines if line[:1] == ["shape"] for name in line[1:]}) == 1
    for name in ("base", "running", "step_s"):
        assert [word for line in lines if line[:1] == [name] for word in line[1:]] == [str(row[name]) for row in rows]
    assert len(turned_tables(rows, tuple(rows[0]), "A title", 3, Console(width=10))) == len(rows)  # each alone
    assert len(turned_tables(rows, tuple(rows[0]), "A title", 3, Console(width=400))) == 1


def test_a_ctrl_c_shows_the_finished_rows(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "rows.csv"

    def interrupt(number: int, frame: FrameType | None) -> None:
        name = "" if frame is None else frame.f_globals.get("__name__", "")
        ours = name.startswith("qerl.")  # no import, nobody's callback
        if ours and path.exists() and len(path.read_text().splitlines()) > 2:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        done = command(*MANY.split(), "--csv", path)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert done.returncode == 130
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert 2 <= len(rows) < 9
    assert [row["batch"] for row in rows] == [int(row["batch"]) for row in rows_of(path)]
    assert sum(line.startswith("toy ") for line in done.stdout.splitlines()) == len(rows)
    assert f"error: Interrupted after {len(rows)} finished rows, shown above and kept in {path}." in done.stderr
    assert "Traceback" not in done.stderr


def test_a_ctrl_c_before_the_first_row_is_one_message(command: Command) -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_globals.get("__name__") == formats.__name__:  # it has begun to measure
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        done = command("bench", "formats")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: Interrupted.\n")


def test_what_fails_in_the_middle_loses_no_row(capsys: pytest.CaptureFixture[str]) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield {"op": "a", "us": 1.5}
        raise ValueError("and then it failed")

    with pytest.raises(ValueError, match="and then it failed"):
        measured(rows(), ("op", "us"), "A title", None)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"rows": [{"op": "a", "us": 1.5}]}


def test_a_file_of_an_older_form_costs_no_row(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "rows.csv"
    words = ("bench", "rollout", "--batch", "1,2", "--prompt", "4", "--device", "cpu", "--max-tokens", "2")
    shown = "model,base,rank,batch,new_tokens,prefill_ms,step_ms,tokens_per_s,of_floor"
    path.write_text(old := f"{shown},gpu,commit\n")
    done = command(*words, "--csv", path)
    assert done.returncode == 0
    assert path.read_text() == old
    assert [row["batch"] for row in rows_of(tmp_path / "rows-2.csv")] == ["1", "2"]
    assert done.stderr.count(f"they go to {tmp_path / 'rows-2.csv'}.") == 1
    path.write_text("name,value\n")
    done = command(*words, "--csv", path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {path} has other columns than these results: name another file.\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("prefill --base fp3", "no base 'fp3'"),
        ("prefill --shape gpt", "no shape 'gpt'"),
        ("startup --shape gpt", "no shape 'gpt'"),
        ("startup --device cuda:77", "no device cuda:77"),
        ("quantize --shape gpt", "no shape 'gpt'"),
        ("quantize --csv {tmp}", "is a folder"),
        ("rollout --csv {tmp}/nowhere/x.csv", "there is no folder"),
        *((f"{name} --csv /proc/x.csv", "--csv /proc/x.csv can't be written to (") for name in COMMANDS),
        ("rollout --batch 1 --kv-cache-dtype int8", "no kv_cache_dtype 'int8'"),
        ("logprobs --kv-cache-dtype int8", "no kv_cache_dtype 'int8'"),
        ("logprobs --base fp3", "no base 'fp3'"),
        ("step --shape gpt", "no shape 'gpt'"),
        ("step --recompute some", "auto, all, none or a number"),
        ("step --updates 3", "must be a multiple of --updates (3)"),
        ("step --tokens 64 --shape gpt", "no shape 'gpt'"),
        ("step --tokens 64 --recompute some", "auto, all, none or a number"),
        ("step --tokens 64 --recompute 99", "toy has 4 blocks. Write all"),
        ("step --recompute 99", "toy has 4 blocks. Write all"),
        (
            "rollout --batch 1 --prompt 100000 --max-tokens 4",
            "100000 tokens and 4 new ones are 100004; the context of",
        ),
        ("rollout --batch 1 --max-tokens 4,33000", "are 33256; the context of toy is 32768"),
        ("rollout --batch 1 --max-tokens 100000", "are 100256; the context of toy is 32768"),
        ("rollout --max-tokens 33000", "; the context of toy is 32768"),
        ("prefill --shape toy --prompt 32767", "are 32769; the context of toy is 32768"),
        ("logprobs --shape toy --prompt 33000 --batch 1 --max-tokens 4", "are 33004; the context of toy is 32768"),
        ("step --prompt 100000", "; the context of toy is 32768"),
        ("step --new 100000", "100000 new ones are"),
        ("rollout --batch 1 --max-tokens 4,1", "--max-tokens must be at least 2"),
        ("step --tokens 64,1", "--tokens must be at least 2"),
        ("linear --shape gpt", "no shape 'gpt'"),
        ("linear --format fp3", "knows nvfp4 and nf4, not 'fp3'"),
    ],
)
def test_bad_words_are_refused_before_any_work(tmp_path: Path, command: Command, words: str, message: str) -> None:
    done = command("bench", *words.format(tmp=tmp_path).split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")  # nothing was said before: no weights were made
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # which is not there without a GPU
    for words, message in (("linear", "with a GPU"), ("startup --device cuda", "This machine has no device cuda")):
        done = command("bench", *words.split())
        assert done.returncode == 2
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_help_says_whose_floor_and_peak_and_what_with_lora_is(command: Command) -> None:
    for name, words in (
        ("rollout", "an H200, which reads weights and cache at 4.0 TB/s"),
        ("step", "an H200's 989 TFLOP/s"),
        ("linear", "an H200 (4.0 TB/s, 780 TFLOP/s)"),
        ("linear", "gate_up includes SwiGLU"),
        ("rollout", "32, on a CPU 8"),
        ("step", "512, on a CPU 64"),
        ("prefill", "qwen2.5-7b on a GPU, toy on a CPU"),
    ):
        assert words in " ".join(command("bench", name, "--help").stdout.replace("│", " ").split())


def test_random_refuses_a_folder_that_is_there_before_a_bar(tmp_path: Path, command: Command) -> None:
    done = command("random", "toy", tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"error: {tmp_path} exists. Name a new folder, or remove it first."]
