"""Benchmark results as CSV: rows are appended, each with the machine and the commit they were measured on."""

import csv
import subprocess
from pathlib import Path
from typing import Any

import torch


def append_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """All rows have the same columns, the file's where it is there; `gpu` ("none" on a CPU) and `commit` are added."""
    stamp = {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none", "commit": commit()}
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    if not new and path.open().readline().strip().split(",") != [*rows[0], *stamp]:
        raise ValueError(f"{path} has other columns than these results: name another file.")
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[*rows[0], *stamp], lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(row | stamp for row in rows)


def commit() -> str:
    """The commit of the package's checkout, with a + where files are changed; "unknown" outside a checkout."""
    here = Path(__file__).parent
    done = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=here, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
