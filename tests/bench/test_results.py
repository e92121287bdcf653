import csv
from pathlib import Path

import pytest

from qerl.bench.results import append_rows


def test_rows_are_appended_with_machine_and_commit(tmp_path: Path) -> None:
    path = tmp_path / "results" / "x.csv"
    append_rows(path, [{"op": "a", "us": 1.5}])
    append_rows(path, [{"op": "b", "us": 2.5}])
    with open(path) as file:
        rows = list(csv.DictReader(file))
    assert [row["op"] for row in rows] == ["a", "b"]
    assert all(row["gpu"] and row["commit"] for row in rows)
    with pytest.raises(ValueError, match=r"x\.csv has other columns than these results: name another file"):
        append_rows(path, [{"op": "c", "seconds": 1}])
