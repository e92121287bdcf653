"""Trackers: the same names and numbers as metrics.jsonl, read back by their own libraries; failures stay theirs."""

import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import qerl
from qerl.config import Config
from qerl.integrations import trackers
from qerl.integrations.trackers import Trackers, require_installed
from qerl.metrics import Metrics, read_metrics
from qerl.rl.checkpoint import checkpoints
from qerl.rl.folder import resumed_config
from tests.rl.test_trainer import few_threads, tiny_job  # noqa: F401 (a fixture)

COLUMNS = {"step": [1, 1], "prompt": ["1+1=", "a|b"], "completion": ["2\n", "c"], "accuracy": [1.0, None]}
SMALL = ("max_steps=3", "save_steps=2", "eval_size=4", "eval_steps=2", "prompts_per_step=2", "num_generations=2")


def as_dict(metrics: Path) -> dict[tuple[str, int], float]:
    lines = read_metrics(metrics)
    return {
        (name, line["step"]): value
        for line in lines
        for name, value in line.items()
        if name not in ("step", "time") and value is not None
    }


def tensorboard_scalars(folder: Path) -> list[tuple[str, int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return [(tag, event.step, event.value) for tag in events.Tags()["scalars"] for event in events.Scalars(tag)]


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    """The rows of history of an offline run, as wandb's own messages have them."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("*.wandb")
    rows = []
    for data in leveldb_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """A .wandb file is a LevelDB log: blocks of 32 kB of chunks, each with checksum, length and kind (1: a whole
    record; 2, 3, 4: its first, a middle, its last part), after seven bytes of wandb's own."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if (room := 32768 - at % 32768) < 7:
            at += room
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def test_a_killed_and_resumed_run_is_in_tensorboard_and_wandb_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tmp_path / "run"
    qerl.train(tiny_job(run, *SMALL, "report_to=[tensorboard, wandb]", "project=sums"))
    first = as_dict(run / "metrics.jsonl")
    found = tensorboard_scalars(run / "tensorboard")
    assert {(name, step): value for name, step, value in found} == pytest.approx(first, rel=1e-5)
    (offline,) = (run / "wandb").glob("offline-run-*")
    history = wandb_history(offline)
    assert {(k, row["_step"]): v for row in history for k, v in row.items() if (k, row["_step"]) in first} == first
    (table,) = [row["completions.path"] for row in history if row["_step"] == 3]
    rows = json.loads((offline / "files" / table).read_text())
    assert rows["columns"] == ["step", "prompt", "completion", "accuracy", "advantage"]
    assert rows["data"][0][2]

    shutil.rmtree(checkpoints(run / "checkpoints")[-1])  # as if killed in the third step
    qerl.train(resumed_config(run, []), resume=True)
    again = tensorboard_scalars(run / "tensorboard")
    assert {(name, step): value for name, step, value in again} == pytest.approx(
        as_dict(run / "metrics.jsonl"), rel=1e-5
    )
    assert len(again) == len(found), "no step twice"
    runs = sorted((run / "wandb").glob("offline-run-*"))
    assert len({path.name.rpartition("-")[2] for path in runs}) == 1, "one id"
    sent = [row["_step"] for path in runs for row in wandb_history(path) if "loss" in row]
    assert sent == [1, 2, 3]
    assert "failed" not in capsys.readouterr().err


def test_tensorboard_has_the_completions_as_text(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = trackers.TensorBoard(Config(output_dir=tmp_path), 0)
    tracker.table(COLUMNS, 1)
    tracker.close(failed=False)
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    (event,) = events.Tensors("completions/text_summary")
    assert event.tensor_proto.string_val[0].decode().splitlines() == [
        "|step|prompt|completion|accuracy|",
        "|---|---|---|---|",
        "|1|1+1=|2<br>|1|",
        "|1|a\\|b|c||",
    ]


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    import trackio

    config = Config(output_dir=tmp_path / "run", project="sums")
    for _ in range(2):  # a run, and the same one resumed
        tracker = trackers.Trackio(config, "abc")
        tracker.log({"loss": 0.5}, 1)
        tracker.table(COLUMNS, 1)
        tracker.close(failed=False)
    (run,) = trackio.Api().runs("sums")
    assert run.name == "run-abc"


class Broken:
    def __init__(self) -> None:
        self.calls = 0

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls += 1
        raise RuntimeError("the server is on fire")

    def table(self, columns: dict[str, list[Any]], step: int) -> None:
        raise AssertionError

    def close(self, failed: bool) -> None:
        raise AssertionError


class Heard(Broken):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def log(self, values: dict[str, float], step: int) -> None:
        self.heard.append((values, step))

    def table(self, columns: dict[str, list[Any]], step: int) -> None:
        self.heard.append(step)

    def close(self, failed: bool) -> None:
        self.heard.append(failed)


def test_a_tracker_that_fails_is_dropped_aloud_once_and_nothing_is_lost(tmp_path: Path) -> None:
    said: list[str] = []
    broken, fine = Broken(), Heard()
    with Metrics(tmp_path / "m.jsonl", Trackers({"broken": broken, "fine": fine}, said.append)) as metrics:
        metrics.log({"loss": 1.0, "note": "x", "kl": None}, 1)
        metrics.completions(COLUMNS, 1)
        metrics.log({"loss": float("nan")}, 2)
    assert [line["step"] for line in read_metrics(tmp_path / "m.jsonl")] == [1, 2]
    assert broken.calls == 1
    assert len(said) == 1
    assert "broken failed" in said[0]
    assert "the server is on fire" in said[0]
    assert fine.heard == [({"loss": 1.0}, 1), 1, ({}, 2), False]


def test_a_tracker_that_cant_start_does_not_stop_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "tensorboard").write_text("a file where its folder belongs")
    assert qerl.train(tiny_job(run, *SMALL, "max_steps=1", "report_to=tensorboard")).steps == 1
    assert capsys.readouterr().err.count("tensorboard failed") == 1


def test_what_a_tracker_has_is_remembered_over_several_kills(tmp_path: Path) -> None:
    """Killed at step 10, resumed from 6, killed at step 8, resumed: it has everything up to 10."""
    (tmp_path / "tensorboard").write_text("no folder: it is not started")
    config = Config(output_dir=tmp_path, report_to=("tensorboard",))
    seen = []
    for done, logged in ((None, -1), (6, 10), (6, 8)):
        trackers.start(config, done, logged, lambda text: None).close()
        seen.append(json.loads((tmp_path / "trackers.json").read_text())["tensorboard"])
    assert [one["seen"] for one in seen] == [-1, 10, 10]
    assert len({one["id"] for one in seen}) == 1
    heard = Heard()
    tracker = trackers.Resumed(heard, 10)
    for step in (9, 10, 11):
        tracker.log({}, step)
        tracker.table({}, step)
    assert heard.heard == [({}, 11), 11]


def test_what_is_not_installed_is_refused_with_the_command_that_installs_it() -> None:
    require_installed(["tensorboard", "wandb"])
    with pytest.raises(ValueError, match=r"pip install 'qerl\[no_such_tracker\]'"):
        require_installed(["no_such_tracker"])
