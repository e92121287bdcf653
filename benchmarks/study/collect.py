"""Runs into one compressed file, for tables.py: `python benchmarks/study/collect.py OUT.jsonl.xz RUNS...`.

RUNS are folders of runs, such as a sweep's. A run is a line with its settings (no paths: those are of one machine), its
pass@8 where evaluate.py has been there, then its metrics, a line a step. Runs that the file has already stay in it,
unless they are among RUNS too: the parts of a study come from several machines. All runs of a file must be of one
model, task and length.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from measures import read_lines, write_lines

from qerl.compare.runs import Run, read_runs

PATHS = ("output_dir", "data_dir", "init_adapter")
SHARED = ("model", "task", "max_steps")


def run_lines(run: Run, model: str | None) -> list[dict[str, Any]]:
    settings = {key: value for key, value in run.settings.items() if key not in PATHS}
    settings["model"] = model or Path(settings["model"]).name
    scores = run.folder / "pass8" / "results.json"
    found = next(iter(json.loads(scores.read_text())["tasks"].values())) if scores.exists() else None
    name = f"{run.folder.parent.name}/{run.folder.name}"
    return [{"run": name, "settings": settings, "pass8": found}, *({"run": name} | line for line in run.lines)]


def merged(path: Path, lines: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """The file's lines of other runs, then these; and how many runs are kept."""
    new = {line["run"] for line in lines}
    kept = [line for line in read_lines(path) if line["run"] not in new] if path.exists() else []
    return kept + lines, len({line["run"] for line in kept})


def require_one_study(lines: list[dict[str, Any]]) -> None:
    """Refuses runs that would be averaged with others though they are something else, or the same once more."""
    headers = [line for line in lines if "settings" in line]
    seen: dict[str, str] = {}
    for header in headers:
        settings, first = header["settings"], headers[0]["settings"]
        for key in SHARED:
            if settings[key] != first[key]:
                raise ValueError(f"{header['run']} has {key}={settings[key]}, others {first[key]}. Leave it out.")
        same = seen.setdefault(json.dumps(settings, sort_keys=True), header["run"])
        if same != header["run"]:
            raise ValueError(f"{same} and {header['run']} have the same settings and seed. Leave one of them out.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--model", help="its name, where the runs know only a folder")
    asked = parser.parse_args()
    try:
        runs = [run for run in read_runs(asked.runs) if not run.damage and not run.unfinished]
        lines, kept = merged(asked.out, [line for run in runs for line in run_lines(run, asked.model)])
        require_one_study(lines)
    except ValueError as error:
        parser.error(str(error))
    write_lines(asked.out, lines)
    print(f"{asked.out}: {len(runs)} finished runs, and {kept} of before")  # noqa: T201


if __name__ == "__main__":
    main()
