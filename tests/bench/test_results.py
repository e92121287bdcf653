import csv
import os
from pathlib import Path

import pytest

from qerl.bench.results import append_rows, commit, require_usable


def rows_in(path: Path) -> list[dict[str, str]]:
    with open(path) as file:
        return list(csv.DictReader(file))


def test_rows_are_appended_with_machine_and_commit(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.touch()  # empty: as if it were not there
    assert append_rows(path, [{"op": "a", "us": 1.5}], commit()) == path
    assert append_rows(path, [{"op": "b", "us": 2.5}], commit()) == path
    assert [row["op"] for row in rows_in(path)] == ["a", "b"]
    assert all(row["gpu"] and row["commit"] for row in rows_in(path))


def test_rows_with_other_columns_go_to_a_file_beside(tmp_path: Path) -> None:
    path, beside = tmp_path / "x.csv", tmp_path / "x-2.csv"
    append_rows(path, [{"op": "a", "us": 1.5}], "c0ffee")
    before = path.read_text()
    for seconds in (1, 2):
        assert append_rows(path, [{"op": "c", "seconds": seconds}], "c0ffee") == beside
    assert [row["seconds"] for row in rows_in(beside)] == ["1", "2"]
    assert append_rows(path, [{"op": "d"}], "c0ffee") == tmp_path / "x-3.csv"
    assert path.read_text() == before


def test_a_file_that_can_not_take_the_rows_is_refused_before(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    require_usable(path, ["op", "us"])
    append_rows(path, [{"op": "a", "us": 1.5, "more": 2}], "c0ffee")
    require_usable(path, ["op", "us"])
    with pytest.raises(ValueError, match=r"x\.csv has other columns than these results: name another file"):
        require_usable(path, ["op", "seconds"])
    with pytest.raises(ValueError, match="is a folder: name a file in it"):
        require_usable(tmp_path, ["op"])
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere"):
        require_usable(tmp_path / "nowhere" / "x.csv", ["op"])
    assert not (tmp_path / "nowhere").exists()
    for name in ("x" * 300, "/proc/x.csv"):
        with pytest.raises(ValueError, match=r"can't be written to \(.*\): name another file"):
            require_usable(tmp_path / name, ["op"])
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "/dev/full"):
        with pytest.raises(ValueError, match="is no regular file: name another file"):
            require_usable(tmp_path / name, ["op"])


def test_looking_at_a_file_leaves_what_was_there(tmp_path: Path) -> None:
    link, target, empty = tmp_path / "link.csv", tmp_path / "target.csv", tmp_path / "empty.csv"
    link.symlink_to(target)
    empty.touch()
    for path in (link, empty, tmp_path / "new.csv"):
        require_usable(path, ["op"])
    assert {path.name for path in tmp_path.iterdir()} == {"link.csv", "empty.csv"}
