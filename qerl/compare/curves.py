"""A metric of a run as a curve over steps or seconds, and of several runs as a mean with a band.

Seconds are those of steps and evaluations, added up: loading, and the pauses of a resumed run, are not in them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qerl.compare.runs import Run

POINTS = 200  # of a mean over seconds, where runs share no abscissae


@dataclass(frozen=True)
class Curve:
    x: np.ndarray[Any, Any]
    y: np.ndarray[Any, Any]


@dataclass(frozen=True)
class Band:
    """Mean, least and largest of several curves, over what all of them cover."""

    x: np.ndarray[Any, Any]
    mean: np.ndarray[Any, Any]
    low: np.ndarray[Any, Any]
    high: np.ndarray[Any, Any]


def seconds_of(run: Run) -> list[float]:
    """Seconds of work up to each line; of old runs that did not measure them, since the first line."""
    if not any("step_time" in line for line in run.lines):
        return [line["time"] - run.lines[0]["time"] for line in run.lines]
    total, found = 0.0, []
    for line in run.lines:
        total += (line.get("step_time") or 0.0) + (line.get("eval_runtime") or 0.0)
        found.append(total)
    return found


def curve(run: Run, key: str, over: str) -> Curve:
    """over: step or seconds. What a line does not have, or has as null (not finite), is left out."""
    places = seconds_of(run) if over == "seconds" else [line["step"] for line in run.lines]
    points = [(x, line[key]) for x, line in zip(places, run.lines, strict=True) if _is_number(line.get(key))]
    return Curve(np.array([x for x, _ in points], dtype=float), np.array([y for _, y in points], dtype=float))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def band(curves: Sequence[Curve], over: str) -> Band | None:
    """Over steps at those that all curves have, over seconds by linear interpolation. None where nothing is shared."""
    curves = [each for each in curves if len(each.x)]
    if not curves:
        return None
    if over == "step":
        shared = set.intersection(*(set(each.x.tolist()) for each in curves))
        x = np.array(sorted(shared), dtype=float)
    else:
        first, last = max(each.x[0] for each in curves), min(each.x[-1] for each in curves)
        x = np.linspace(first, last, POINTS if last > first else 1) if last >= first else np.array([])
    if not len(x):
        return None
    values = np.stack([np.interp(x, each.x, each.y) for each in curves])
    return Band(x, values.mean(axis=0), values.min(axis=0), values.max(axis=0))
