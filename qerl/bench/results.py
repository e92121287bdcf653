"""Benchmark results as CSV: rows are appended, each with the machine and the commit they were measured on."""

import csv
import shutil
import subprocess
from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

STAMP = ("gpu", "commit")


def require_usable(path: Path, columns: Sequence[str]) -> None:
    """Refuses a file that can't take rows with (at least) these columns, before anything is measured."""
    try:
        header = _tried(path)
    except OSError as error:
        raise ValueError(f"--csv {path} can't be written to ({error.strerror}): name another file.") from error
    if header and not {*columns, *STAMP} <= set(header):
        raise ValueError(f"{path} has other columns than these results: name another file.")


def _tried(path: Path) -> list[str]:
    """The columns of a file that was opened for writing, since permissions do not say all. One that was not there is
    not there after it."""
    if path.is_dir():
        raise ValueError(f"--csv {path} is a folder: name a file in it.")
    if not path.parent.is_dir():
        raise ValueError(f"--csv {path}: there is no folder {path.parent}. Make it first.")
    new = not path.exists()
    if not new and not path.is_file():  # a device or a pipe, whose columns can't be read back
        raise ValueError(f"--csv {path} is no regular file: name another file.")
    with open(path, "a"):
        pass
    if new:
        path.resolve().unlink()  # of a link, what it points to
    return _header(path)


def append_rows(path: Path, rows: list[dict[str, Any]], at: str) -> Path:
    """All rows have the same columns; `gpu` ("none" on a CPU) and `commit` (at) are added. Where the file has other
    columns, nothing is lost: they go to a file beside it, NAME-2.csv and so on. Returns the file that has them."""
    stamp = {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none", "commit": at}
    names = [*rows[0], *stamp]
    candidates = chain([path], (path.with_name(f"{path.stem}-{i}{path.suffix}") for i in count(2)))
    chosen = next(one for one in candidates if _header(one) in ([], names))
    new = not _header(chosen)
    with open(chosen, "a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=names, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(row | stamp for row in rows)
    return chosen


def _header(path: Path) -> list[str]:
    """The columns of a file; none where it is not there, or empty."""
    if not path.exists():
        return []
    with open(path, errors="replace", newline="") as file:
        return next(csv.reader(file), [])


def commit() -> str:
    """The commit of the package's checkout, with a + where files are changed; "unknown" outside a checkout."""
    if shutil.which("git") is None:
        return "unknown"
    here = Path(__file__).parent
    done = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=here, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
