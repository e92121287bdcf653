"""A sweep: each run in a process of its own, so that one that crashes or leaves memory behind harms no other.

sweep.json in the sweep's folder lists the grid and how each run ended; NAME.log beside it holds what the run said. The
same command again skips what is finished, resumes what was begun, and tries again what failed.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from qerl.config import ConfigError
from qerl.errors import Interrupted
from qerl.metrics import read_metrics
from qerl.quant.partial import locked, writable, write_json
from qerl.rl.folder import CHECKPOINTS, CONFIG, METRICS, require_same
from qerl.sweep.grid import Grid, Point

LISTING = "sweep.json"
LOOK_EVERY = 0.5  # seconds between looks at a run's metrics
DONE, FAILED, BEGUN, WAITING = "done", "failed", "begun", "waiting"


@dataclass(frozen=True)
class Outcome:
    """How a run stands."""

    status: str
    result: dict[str, Any] | None = None  # what `qerl train` ended with
    reason: str = ""  # of a failure


OnStep = Callable[[int, Point, dict[str, Any] | None], None]  # number of the run, the run, its last line of metrics


def run_sweep(grid: Grid, on_step: OnStep = lambda number, point, line: None) -> list[Outcome]:
    """All runs of the grid, one after another; how each ended, in the grid's order. Failures do not end the sweep."""
    with claimed(grid.folder):
        outcomes = read_outcomes(grid)
        _write(grid, outcomes)
        for number, point in enumerate(grid.points):
            if outcomes[number].status != DONE:
                outcomes[number] = Outcome(BEGUN)
                _write(grid, outcomes)
                outcomes[number] = _run(grid, point, partial(on_step, number, point))
                _write(grid, outcomes)
            on_step(number, point, None)
    return outcomes


def read_outcomes(grid: Grid) -> list[Outcome]:
    """How the grid's runs stand by sweep.json. Begun ones must have the settings that are asked for now."""
    path = grid.folder / LISTING
    listed: dict[str, Any] = {}
    if path.is_file():
        try:
            listed = {entry["name"]: entry for entry in json.loads(path.read_text())["runs"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no list of a sweep ({error}). Name another output_dir.") from error
    outcomes = []
    for point in grid.points:
        folder = grid.folder / point.name
        if (folder / CONFIG).is_file():
            try:
                require_same(point.config, folder)
            except ConfigError as error:
                raise ConfigError(f"{folder} was begun with other settings. {error}") from error
        most, done = point.config.max_steps, (_last_line(folder / METRICS) or {}).get("step", 0)
        if 0 <= most < done:
            raise ConfigError(
                f"{folder} has {done} steps, more than max_steps={most}: runs of one sweep should be as long. "
                "Name another output_dir, or more steps."
            )
        entry = listed.get(point.name, {})
        same = entry.get("length") == _length(point) and (folder / METRICS).is_file()
        finished = same and entry.get("status") == DONE
        outcomes.append(Outcome(DONE, entry.get("result")) if finished else Outcome(WAITING))
    return outcomes


def train_command(grid: Grid, point: Point) -> list[str]:
    """The run as a person would start it; one that was begun is resumed."""
    folder = grid.folder / point.name
    if (folder / CONFIG).is_file():
        config = point.config
        may_change = [f"max_steps={config.max_steps}", f"num_train_epochs={config.num_train_epochs}"]
        return ["train", "--resume", f"output_dir={folder}", *may_change]
    return ["train", str(grid.recipe), *point.words, f"output_dir={folder}"]


def _run(grid: Grid, point: Point, on_line: Callable[[dict[str, Any] | None], None]) -> Outcome:
    log, folder = grid.folder / f"{point.name}.log", grid.folder / point.name
    with writable(log), open(log, "ab") as file:
        said = file.tell()
        command = [sys.executable, "-m", "qerl", *train_command(grid, point)]
        # A session of its own: Ctrl-C reaches the run through `_wait` alone, and once.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)
        _wait(process, grid, folder / METRICS, on_line)
    text = log.read_bytes()[said:].decode(errors="replace").strip()
    if process.returncode == 0:
        return Outcome(DONE, last_result(text))
    return Outcome(FAILED, reason=_reason(text, process.returncode, log))


def _wait(process: subprocess.Popen[bytes], grid: Grid, metrics: Path, on_line: Callable[[Any], None]) -> None:
    """Until the process ends. Ctrl-C is handed on: the run saves itself and ends, and so does the sweep."""
    asked = 0
    while process.poll() is None:
        try:
            if line := _last_line(metrics):
                on_line(line)
            process.wait(LOOK_EVERY)
        except subprocess.TimeoutExpired:
            pass
        except KeyboardInterrupt:
            asked += 1  # the run breaks its update off at a second one; a third ends it without asking
            process.send_signal(signal.SIGINT if asked < 3 else signal.SIGKILL)
    if asked:
        saved = any((metrics.parent / CHECKPOINTS).glob("*"))
        kept, then = ("saved what it had", "resumes") if saved else ("had nothing to save yet", "starts over")
        begun = any(_last_line(grid.folder / point.name / METRICS) for point in grid.points)
        raise Interrupted(
            f"Interrupted; {metrics.parent.name} {kept}. Run the same command again to go on: finished runs are "
            f"skipped, and this one {then}."
            + (f" `qerl compare {grid.folder}` shows what is there." if begun else " No run has finished a step yet.")
        ) from KeyboardInterrupt()


def _last_line(metrics: Path) -> dict[str, Any] | None:
    lines = read_metrics(metrics) if metrics.is_file() else []
    return lines[-1] if lines else None


def last_result(text: str) -> dict[str, Any] | None:
    """What the run ended with: its last line of JSON, after which libraries may have said something at their end."""
    for line in reversed(text.split("\n")):
        if line.startswith('{"'):
            with suppress(json.JSONDecodeError):  # something else that begins so
                result: dict[str, Any] = json.loads(line)
                return result
    return None


def _reason(text: str, status: int, log: Path) -> str:
    """The run's own message where it gave one."""
    _, found, message = text.rpartition("error: ")
    if status == 2 and found:
        return " ".join(message.split())
    last = text.splitlines()[-1].strip() if text else "it said nothing"
    how = f"ended by signal {-status}" if status < 0 else f"exit status {status}"
    return f"{how}; its last words: {last[:200]} (all of them in {log})"


def _length(point: Point) -> list[float]:
    return [point.config.max_steps, point.config.num_train_epochs]


def _write(grid: Grid, outcomes: list[Outcome]) -> None:
    """sweep.json: runs of an earlier, other grid in this folder stay listed."""
    path = grid.folder / LISTING
    before = json.loads(path.read_text())["runs"] if path.is_file() else []
    now = []
    for point, outcome in zip(grid.points, outcomes, strict=True):
        entry = {"name": point.name, "status": outcome.status, "settings": list(point.words), "length": _length(point)}
        now.append(entry | {"result": outcome.result, "reason": outcome.reason})
    names = {point.name for point in grid.points}
    kept = [entry for entry in before if entry["name"] not in names]
    write_json(path, {"recipe": str(grid.recipe), "varied": list(grid.varied), "runs": [*now, *kept]})


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Inside, no second sweep works in the folder."""
    if (folder / METRICS).exists():
        raise ConfigError(f"{folder} holds a run itself. Name another output_dir for the sweep.")
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, f"Another sweep is at work in {folder}. Name another output_dir."):
        yield
