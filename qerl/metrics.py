"""What a run measures, as JSON Lines: one object a step, never rewritten, readable while the run goes on.

Trackers, if there are any, are told the same after the file has it.
"""

import json
import math
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol


class Listener(Protocol):
    """Who else hears of metrics; `qerl.integrations.trackers`."""

    def log(self, values: dict[str, Any], step: int) -> None: ...

    def table(self, columns: dict[str, list[Any]], step: int) -> None: ...

    def close(self, failed: bool) -> None: ...


class Metrics:
    """Appends to `path`; every line is on disk, as far as the system's cache, when `log` returns."""

    def __init__(self, path: Path, trackers: Listener | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.trackers = path, trackers
        drop_torn_line(path)
        self._last = last_step(path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def log(self, values: dict[str, Any], step: int) -> None:
        """One line: step, wall time, and the values. Numbers of torch and numpy are taken; NaN and Inf become null.

        Steps may repeat (training and evaluation of one step) but never go back.
        """
        if step < self._last:
            raise ValueError(f"Metrics of step {step} come after step {self._last} in {self.path}.")
        if clash := {"step", "time"} & values.keys():
            raise ValueError(f"Metrics can't be named {', '.join(sorted(clash))}: every line has those already.")
        plain = {key: _plain(key, value) for key, value in values.items()}
        line = {"step": step, "time": round(time.time(), 3)} | plain
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        self._last = step
        if self.trackers is not None:
            self.trackers.log(plain, step)

    def completions(self, columns: dict[str, list[Any]], step: int) -> None:
        """A step's table of completions, for trackers; the run's folder has it as Parquet."""
        if self.trackers is not None:
            self.trackers.table(columns, step)

    def close(self, failed: bool = False) -> None:
        self._file.close()
        if self.trackers is not None:
            self.trackers.close(failed)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close(failed=kind is not None)


def last_step(path: Path) -> int:
    """The last step that a metrics file has; -1: none."""
    return max((line["step"] for line in read_metrics(path)), default=-1) if path.exists() else -1


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a metrics file; a last line cut short by a crash is left out."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], 1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"Line {number} of {path} is not JSON: {error.msg} at column {error.colno}.") from error
    return found


def drop_torn_line(path: Path) -> None:
    """Cut a last line that a crash left unfinished, so that the next one starts on its own."""
    if path.exists():
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            with open(path, "r+b") as file:
                file.truncate(whole)


def _plain(key: str, value: Any) -> Any:
    if hasattr(value, "item"):  # a number of torch or numpy
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"Metric {key!r} is a {type(value).__name__}; log numbers, strings or None.")
