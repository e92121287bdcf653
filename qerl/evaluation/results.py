"""A folder of results: settings.json, a file of samples a task, written as they are graded, then results.json.

A line of samples is one completion: task, id (the question's place among the task's held-out rows), sample, prompt,
completion, answer (as the grader reads it), finish_reason, tokens, right (the row's answer), graded_by (what the score
depends on, see grading.py), score (null: the grader does not apply), and grading_error where the grader failed. A
sample that was graded again has several lines; the last one counts.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qerl.metrics import read_metrics
from qerl.quant.partial import locked, writable, write_json

SETTINGS, RESULTS = "settings.json", "results.json"

Line = dict[str, Any]
Lines = dict[tuple[int, int], Line]  # by question and sample


@contextmanager
def claimed(folder: Path, settings: dict[str, Any]) -> Iterator[None]:
    """Inside, the folder is this process's own, and holds results of these settings only. A new one that gets no sample
    is removed again."""
    path = folder / SETTINGS
    new = not folder.exists()
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} is not a folder of results. Name a new one with --out.")
    with locked(folder, f"Another process is at work in {folder}. Wait for it, or name another --out."):
        if path.exists() and (before := json.loads(path.read_text())) != settings:
            odd = [key for key in settings if before.get(key) != settings[key]]
            raise ValueError(f"{folder} holds results with another {', '.join(odd)}. Name another --out.")
        with writable(folder):
            write_json(path, settings)
        try:
            yield
        finally:
            if new and [file.name for file in folder.iterdir()] == [SETTINGS]:
                path.unlink()
                folder.rmdir()


def samples_file(folder: Path, task: str) -> Path:
    return folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', task)}.samples.jsonl"


def read_samples(path: Path) -> Lines:
    """All whole lines of a file of samples."""
    try:
        return {(line["id"], line["sample"]): line for line in read_metrics(path)}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a file of samples, or it is damaged: {error!r}.") from error
