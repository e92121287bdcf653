"""Rows from files and the hub: what is found where, and how bad files are refused."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from qerl.tasks.source import HubSplit, load_rows, local_file, read_rows

SPLIT = HubSplit("owner/name", "test", files=("short_test",))


def test_jsonl_and_parquet_give_the_same_rows(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "ü\u2028", "answer": 2}]
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n\n" for row in rows), encoding="utf-8-sig")
    table = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    assert read_rows(lines) == read_rows(table) == rows


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n{"a": \n', "line 2: not JSON"),
        (b'{"a": 1}\n\n[1]\n', "line 3: a row is an object .* not list"),
        (b'{"a": 1}\n"x"\n', "line 2: a row is an object"),
        (b'{"a": 1}\n{"a": "\xff"}\n', "line 2: not UTF-8"),
        (b'{"a": 1} {"a": 2}\n', "line 1: not JSON"),
        (b"[" * 100_000, "line 1: nested too deep"),
        (b"", "has no rows"),
        (b"\n \n", "has no rows"),
    ],
)
def test_bad_lines_are_refused_by_number(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_rows(path)


def test_other_bad_files(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "rows.csv").write_text("a,b\n")
    for name, message in (
        ("bad.parquet", "Parquet"),
        ("rows.csv", "neither .jsonl nor .parquet"),
        ("no.jsonl", "no file"),
    ):
        with pytest.raises(ValueError, match=message):
            read_rows(tmp_path / name)


@pytest.mark.parametrize("name", ["short_test.jsonl", "owner__name_test.jsonl", "name_test.parquet"])
def test_a_hub_id_resolves_to_a_local_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if path.suffix == ".jsonl":
        path.write_text('{"a": 1}\n')
    else:
        pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), path)
    rows, where = load_rows(SPLIT, tmp_path)
    assert rows == [{"a": 1}]
    assert where == str(path)


def test_a_file_without_a_split_is_the_train_split(tmp_path: Path) -> None:
    (tmp_path / "name.jsonl").write_text('{"a": 1}\n')
    assert local_file(SPLIT, tmp_path) is None
    assert local_file(HubSplit("owner/name"), tmp_path) == tmp_path / "name.jsonl"


def test_a_data_dir_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder"):
        load_rows(SPLIT, tmp_path / "nowhere")


def fake_datasets(monkeypatch: pytest.MonkeyPatch, load: Any) -> None:
    module = types.ModuleType("datasets")
    module.load_dataset = load  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_the_hub_is_asked_where_there_is_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def load(*args: Any, **kwargs: Any) -> list[dict[str, int]]:
        asked.append((args, kwargs))
        return [{"a": 1}]

    fake_datasets(monkeypatch, load)
    assert load_rows(HubSplit("owner/name", "test", "main"), tmp_path)[0] == [{"a": 1}]
    assert asked == [(("owner/name", "main"), {"split": "test"})]


def test_a_hub_that_can_not_be_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("Couldn't reach it\nmore")

    fake_datasets(monkeypatch, load)
    with pytest.raises(ValueError, match=r"owner/name, split test.*Couldn't reach it\. .*short_test\.jsonl.*data_dir"):
        load_rows(SPLIT, tmp_path)


def test_without_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"owner/name.*qerl\[data\].*data_dir is not set"):
        load_rows(SPLIT)
