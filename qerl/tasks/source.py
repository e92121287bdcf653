"""Rows of a data set: from a local JSONL or Parquet file, or from the hub through `datasets`.

A hub id resolves to a local file where `data_dir` holds one. For `owner/name` and its split `test` these names are
tried, each with .jsonl and .parquet: those that a registered task brings (`gsm8k_test`), `owner__name_test`,
`name_test`, and, for the train split, the same without the split's name. Nothing is unpickled, and no code of a data
set is run.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]

SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True)
class HubSplit:
    """A split of a data set on the hub, and the names that a local file of it may have."""

    hub_id: str
    split: str = "train"
    subset: str | None = None  # the hub's "config name"
    files: tuple[str, ...] = ()  # without suffix

    def file_names(self) -> tuple[str, ...]:
        owner, _, name = self.hub_id.rpartition("/")
        plain = (f"{owner}__{name}", name) if owner else (name,)
        own = tuple(f"{stem}_{self.split}" for stem in plain)
        return (*self.files, *own, *(plain if self.split == "train" else ()))

    def __str__(self) -> str:
        return f"{self.hub_id}{f' ({self.subset})' if self.subset else ''}, split {self.split}"


def load_rows(source: HubSplit, data_dir: Path | None = None) -> tuple[Sequence[Row], str]:
    """The rows, from `data_dir` where it holds them, else from the hub; and where they came from, for messages."""
    path = local_file(source, data_dir)
    if path is not None:
        return read_rows(path), str(path)
    return _hub_rows(source, data_dir), str(source)


def local_file(source: HubSplit, data_dir: Path | None) -> Path | None:
    if data_dir is None:
        return None
    if not data_dir.is_dir():
        raise ValueError(f"data_dir {data_dir} is not a folder.")
    paths = (data_dir / f"{stem}{suffix}" for stem in source.file_names() for suffix in SUFFIXES)
    return next((path for path in paths if path.is_file()), None)


def read_rows(path: Path) -> list[Row]:
    """All rows of a JSONL or Parquet file; one that is not sound is refused with the line it fails at."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} is neither {' nor '.join(SUFFIXES)}; write it as JSON Lines or Parquet.")
    if not path.is_file():
        raise ValueError(f"There is no file {path}.")
    rows = [row for _, row in numbered_rows(path)] if path.suffix == ".jsonl" else _read_parquet(path)
    if not rows:
        raise ValueError(f"{path} has no rows.")
    return rows


def numbered_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """The rows of a JSON Lines file, each with its line's number. A line ends at a line feed alone: JSON may hold other
    separators that Python splits lines at."""
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {number}: not UTF-8 ({error.reason} at byte {error.start}).") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno}).") from error
        except RecursionError as error:
            raise ValueError(f"{path}, line {number}: nested too deep.") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: a row is an object {{..}}, not {type(row).__name__}.")
        yield number, row


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows: list[Row] = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} can't be read as Parquet: {error}") from error
    return rows


def _hub_rows(source: HubSplit, data_dir: Path | None) -> Sequence[Row]:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{source} comes from the hub, which needs `pip install 'qerl[data]'`. {_or_local(source, data_dir)}"
        ) from error
    try:
        rows: Sequence[Row] = datasets.load_dataset(source.hub_id, source.subset, split=source.split)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(" .:") if str(error).strip() else type(error).__name__
        raise ValueError(
            f"The data set {source} can't be had from the hub: {reason}. {_or_local(source, data_dir)}"
        ) from error
    return rows


def _or_local(source: HubSplit, data_dir: Path | None) -> str:
    where = f"{data_dir} does not hold it" if data_dir else "data_dir is not set"
    return f"({where}.) Put it as {source.file_names()[0]}.jsonl or .parquet into a folder and set data_dir to that."
