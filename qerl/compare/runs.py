"""Runs read from their folders, and grouped by what was asked of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qerl.config import Config
from qerl.metrics import read_metrics
from qerl.recipe import settings
from qerl.rl.folder import CONFIG, MAY_CHANGE, METRICS

# Settings that do not change what is learnt: runs that differ in these alone are one group.
NOT_COMPARED = {"seed", "reward_workers", "reward_memory_mb", "reward_timeout"} | (
    MAY_CHANGE - {"device", "max_steps", "num_train_epochs"}
)
MOST_IN_A_LABEL = 3  # settings; beyond that the folder's name says more


@dataclass(frozen=True)
class Run:
    folder: Path
    settings: dict[str, Any]  # by dotted keys
    lines: list[dict[str, Any]]  # of metrics.jsonl
    damage: str = ""  # why it could not be read

    @property
    def steps(self) -> int:
        return max((line["step"] for line in self.lines), default=0)

    @property
    def asked_steps(self) -> int | None:
        """None where the length goes by epochs."""
        asked = self.settings.get("max_steps", -1)
        return asked if isinstance(asked, int) and asked > 0 else None

    @property
    def unfinished(self) -> bool:
        return self.asked_steps is not None and self.steps < self.asked_steps


@dataclass(frozen=True)
class Group:
    """Runs of the same settings, but for the seed."""

    label: str
    settings: dict[str, Any]  # those that differ between groups
    runs: tuple[Run, ...]

    @property
    def seeds(self) -> list[Any]:
        return sorted(run.settings.get("seed", 0) for run in self.runs)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in these folders; a folder of runs, such as a sweep's, stands for all of them. Each counts once."""
    found: dict[Path, Run] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"There is no folder {folder}. Name the output_dir of a run, or a folder of such.")
        inside = [folder] if (folder / METRICS).is_file() else sorted(p.parent for p in folder.glob(f"*/{METRICS}"))
        if not inside:
            raise ValueError(f"{folder} holds no run: there is no {METRICS} in it, nor in a folder inside it.")
        for path in inside:
            if path.resolve() not in found:
                found[path.resolve()] = _read_run(path)
    return list(found.values())


def _read_run(folder: Path) -> Run:
    """Settings are taken as they stand, so that runs of other versions can be compared; missing ones are defaults."""
    path = folder / CONFIG
    try:
        stored = yaml.safe_load(path.read_text()) if path.is_file() else None
        lines = read_metrics(folder / METRICS)
    except (yaml.YAMLError, ValueError) as error:
        return Run(folder, {}, [], f"{folder} can't be read: {error}")
    if not isinstance(stored, dict):
        return Run(folder, {}, [], f"{folder} has no {CONFIG} with a run's settings.")
    if not all(isinstance(line, dict) and "step" in line for line in lines):
        return Run(folder, {}, [], f"{folder / METRICS} has lines that are no metrics of a step.")
    defaults = {entry.key: _plain(entry.value) for entry in settings(Config())}
    return Run(folder, defaults | _flat(stored), lines)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _plain(value: Any) -> Any:
    """As YAML would give it."""
    return list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """In the order in which groups first appear."""
    keys = sorted({key for run in runs for key in run.settings} - NOT_COMPARED)
    differing = [key for key in keys if len({repr(run.settings.get(key)) for run in runs}) > 1]
    together: dict[str, list[Run]] = {}
    for run in runs:
        together.setdefault(repr([run.settings.get(key) for key in differing]), []).append(run)
    groups = []
    for members in together.values():
        values = {key: members[0].settings.get(key) for key in differing}
        groups.append(Group(_label(values, members), values, tuple(members)))
    return groups


def _label(values: dict[str, Any], members: list[Run]) -> str:
    """The settings that differ; where those are none or many, the folder's name."""
    if not values and len(members) > 1:
        return "all runs"
    if not values or len(values) > MOST_IN_A_LABEL:
        return members[0].folder.resolve().name
    return ", ".join(f"{key}={_short(value)}" for key, value in values.items())


def _short(value: Any) -> str:
    text = "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 32 else f"{text[:15]}...{text[-14:]}"
