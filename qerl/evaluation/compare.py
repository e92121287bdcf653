"""Two folders of results, or two files of samples, question by question."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl.evaluation.estimators import Difference, paired
from qerl.evaluation.results import SETTINGS, Line, read_samples
from qerl.evaluation.summary import right


@dataclass(frozen=True)
class TaskComparison:
    """pass@1 of both on the questions that both answered."""

    task: str
    questions: int
    left_out: int  # questions that only one of the two has
    a: float
    b: float
    better: int  # questions on which b is right more often
    worse: int
    difference: Difference  # b - a


def compare(a: Path, b: Path, seed: int = 0) -> list[TaskComparison]:
    """All tasks that both have, by a paired bootstrap over questions."""
    one, other = _by_task(a), _by_task(b)
    if a.is_file() and b.is_file() and one.keys() != other.keys():
        raise ValueError(f"{a} is of the task {', '.join(one)}, {b} of {', '.join(other)}: compare the same task.")
    tasks = [task for task in one if task in other]
    if not tasks:
        raise ValueError(f"{a} has the tasks {', '.join(one)}, {b} has {', '.join(other)}: none in common.")
    return [_compare(task, one[task], other[task], seed) for task in tasks]


def changed_settings(a: Path, b: Path) -> dict[str, tuple[Any, Any]]:
    """In what the two differ, where both are folders."""
    if not (a / SETTINGS).is_file() or not (b / SETTINGS).is_file():
        return {}
    one, other = (json.loads((folder / SETTINGS).read_text()) for folder in (a, b))
    return {key: (one.get(key), other.get(key)) for key in one if one.get(key) != other.get(key)}


def _compare(task: str, a: dict[int, list[Line]], b: dict[int, list[Line]], seed: int) -> TaskComparison:
    both = sorted(a.keys() & b.keys())
    if not both:
        raise ValueError(f"The two have no question of {task} in common.")
    for i in both:
        if _asked(a[i][0]) != _asked(b[i][0]):
            raise ValueError(f"Question {i} of {task} is not the same on both sides: their data differ.")
    values_a, values_b = ([_share(side[i]) for i in both] for side in (a, b))
    pairs = list(zip(values_a, values_b, strict=True))
    return TaskComparison(
        task,
        len(both),
        len(a.keys() ^ b.keys()),
        sum(values_a) / len(both),
        sum(values_b) / len(both),
        sum(y > x for x, y in pairs),
        sum(y < x for x, y in pairs),
        paired(values_a, values_b, seed),
    )


def _by_task(path: Path) -> dict[str, dict[int, list[Line]]]:
    """Graded samples by task and question, of a file or of all files in a folder."""
    files = sorted(path.glob("*.samples.jsonl")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise ValueError(f"{path} is neither a folder of results nor a file of samples (TASK.samples.jsonl).")
    found: dict[str, dict[int, list[Line]]] = {}
    for file in files:
        for (i, _), line in sorted(read_samples(file).items()):
            if line["score"] is not None:
                found.setdefault(line["task"], {}).setdefault(i, []).append(line)
    if not found:
        raise ValueError(f"{path} holds no graded samples.")
    return found


def _asked(line: Line) -> Any:
    """The question itself: the system prompt may differ between two evaluations that are compared."""
    return line["prompt"] if isinstance(line["prompt"], str) else line["prompt"][-1]["content"]


def _share(group: list[Line]) -> float:
    return sum(right(line) for line in group) / len(group)
