"""Runs read back from results/, a few measures of each, and intervals over seeds and prompts."""

import json
import lzma
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

# 97.5 % points of Student's t by degrees of freedom.
T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
T |= {10: 2.228, 11: 2.201, 12: 2.179, 13: 2.160, 14: 2.145, 15: 2.131, 16: 2.120, 17: 2.110, 18: 2.101, 19: 2.093}
LAST = 5  # steps that count as the end
DRAWS = 2000  # of a bootstrap


@dataclass(frozen=True)
class Run:
    name: str
    settings: dict[str, Any]  # by dotted keys
    pass8: dict[str, Any] | None  # what evaluate.py found
    steps: list[dict[str, Any]]  # of training
    evals: list[dict[str, Any]]

    @property
    def seed(self) -> int:
        return int(self.settings["seed"])

    def is_of(self, arm: dict[str, Any]) -> bool:
        return all(self.settings[key] == value for key, value in arm.items())

    def at_end(self, key: str) -> float:
        return mean_of(self.steps[-LAST:], key)

    def over_all(self, key: str) -> float:
        return mean_of(self.steps, key)


def mean_of(lines: Sequence[dict[str, Any]], key: str) -> float:
    """Of the lines that have it: a step that trained on nothing has no entropy."""
    found = [line[key] for line in lines if line.get(key) is not None]
    return mean(found) if found else math.nan


def read_lines(path: Path) -> list[dict[str, Any]]:
    with lzma.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """JSON Lines, compressed, at once: whatever goes wrong, an earlier file stays whole."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    beside = path.with_name(f"{path.name}.writing")
    beside.write_bytes(lzma.compress(text.encode(), preset=9))
    beside.replace(path)


def read_runs(path: Path) -> list[Run]:
    """As collect.py wrote them; none where there is no such file."""
    runs: dict[str, Run] = {}
    for line in read_lines(path) if path.exists() else []:
        name = line.pop("run")
        if "settings" in line:
            runs[name] = Run(name, line["settings"], line["pass8"], [], [])
        else:
            (runs[name].evals if "eval_reward" in line else runs[name].steps).append(line)
    return list(runs.values())


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Mean and half of its 95 % interval by Student's t; None where there are fewer than two values."""
    if len(values) < 2:
        return None
    return mean(values), students(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def students(degrees: int) -> float:
    """The 97.5 % point of Student's t."""
    z = 1.959964
    beyond = z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)  # to 0.0005 from 20 on
    return T.get(degrees, beyond)


def paired(runs: Sequence[Run], others: Sequence[Run], measure: Callable[[Run], float]) -> list[float]:
    """runs' measure less others', seed by seed: a seed fixes questions, order and random numbers in both."""
    of = {run.seed: measure(run) for run in others}
    return [measure(run) - of[run.seed] for run in runs if run.seed in of]


def bootstrap(rows: Sequence[tuple[float, ...]], of: Callable[[Any], Any]) -> list[float]:
    """[value, low, high] of a function of the rows' sums: 95 % interval when rows are drawn again with replacement."""
    values = np.array(rows)
    picked = np.random.default_rng(0).integers(len(values), size=(DRAWS, len(values)))
    low, high = np.quantile(of(values[picked].sum(axis=1)), [0.025, 0.975])
    return [float(of(values.sum(axis=0))), float(low), float(high)]


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
