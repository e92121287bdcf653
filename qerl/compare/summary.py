"""Groups of runs in numbers: how they ended, averaged over seeds."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from qerl.compare.curves import curve, seconds_of
from qerl.compare.pictures import plot_groups
from qerl.compare.runs import Group, Run, group_runs, read_runs
from qerl.quant.partial import writable, write_json

SUMMARY = "comparison.json"
# column: (metric, which part of a run counts). A single step is noisy; an evaluation is not.
COLUMNS = {
    "reward": ("reward", "end"),
    "accuracy": ("accuracy", "end"),
    "held-out reward": ("eval_reward", "last"),
    "held-out accuracy": ("eval_accuracy", "last"),
    "entropy": ("entropy", "end"),
    "sigma": ("noise/sigma", "end"),
    "length": ("completions/mean_length", "end"),
    "tokens/s": ("rollout/tokens_per_s", "all"),
}


@dataclass(frozen=True)
class Spread:
    """A value over the runs of a group that have it."""

    mean: float
    std: float | None  # None of a single run
    low: float
    high: float
    runs: int


@dataclass(frozen=True)
class Comparison:
    groups: list[Group]
    values: dict[str, dict[str, Spread | None]]  # by label and column
    notes: list[str]  # what a reader must know: unfinished runs, seeds that repeat
    pictures: list[Path]

    def summary(self) -> dict[str, Any]:
        found = []
        for group in self.groups:
            values = {name: None if s is None else vars(s) for name, s in self.values[group.label].items()}
            folders = [str(run.folder) for run in group.runs]
            entry = {"label": group.label, "settings": group.settings, "seeds": group.seeds, "runs": folders}
            found.append(entry | {"steps": [run.steps for run in group.runs], "values": values})
        return {"groups": found, "notes": self.notes, "pictures": [str(path) for path in self.pictures]}


def compare(folders: Sequence[Path], out: Path) -> Comparison:
    """Reads the runs, draws by_step.png and by_seconds.png into `out`, and writes comparison.json there."""
    runs = read_runs(folders)
    notes = [
        f"{run.damage or f'{run.folder} has not finished a step.'} It is left out." for run in runs if run.steps == 0
    ]
    runs = [run for run in runs if run.steps > 0]
    if not runs:
        raise ValueError(f"Nothing to compare yet: {' '.join(notes)}")
    groups = _labelled_apart(group_runs(runs))
    notes += _notes(groups)
    values = {group.label: _values(group) for group in groups}
    with writable(out):
        pictures = plot_groups(groups, out)
        made = Comparison(groups, values, notes, pictures)
        write_json(out / SUMMARY, made.summary())
    return made


def _labelled_apart(groups: list[Group]) -> list[Group]:
    """Two folders may share a name: such labels are numbered."""
    labels = [group.label for group in groups]
    return [
        Group(f"{g.label} #{i + 1}" if labels.count(g.label) > 1 else g.label, g.settings, g.runs)
        for i, g in enumerate(groups)
    ]


def _notes(groups: list[Group]) -> list[str]:
    notes = []
    for group in groups:
        for run in group.runs:
            if run.unfinished:
                notes.append(f"{run.folder} is unfinished: step {run.steps} of {run.asked_steps}.")
        if len({run.steps for run in group.runs}) > 1:
            notes.append(f"{group.label}: runs of different lengths; mean and band cover what all of them reached.")
        if len(set(group.seeds)) < len(group.seeds):
            notes.append(f"{group.label}: several runs have the same seed, which makes the band look narrower.")
    return notes


def _values(group: Group) -> dict[str, Spread | None]:
    ends = min(run.steps for run in group.runs)
    found: dict[str, Spread | None] = {}
    for column, (key, part) in COLUMNS.items():
        found[column] = _spread([_value(run, key, part, ends) for run in group.runs])
    found["seconds"] = _spread([seconds_of(run)[-1] for run in group.runs])
    return found


def _value(run: Run, key: str, part: str, ends: int) -> float | None:
    """end: the mean over the last tenth of the steps that all runs of the group reached; last: the last value there."""
    points = curve(run, key, "step")
    kept = points.y[points.x <= ends] if part != "all" else points.y
    if not len(kept):
        return None
    counted = {"last": 1, "end": max(1, len(kept) // 10), "all": len(kept)}[part]
    return float(kept[-counted:].mean())


def _spread(values: Sequence[float | None]) -> Spread | None:
    there = [value for value in values if value is not None]
    if not there:
        return None
    return Spread(mean(there), stdev(there) if len(there) > 1 else None, min(there), max(there), len(there))
