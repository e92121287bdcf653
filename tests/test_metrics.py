import json
from pathlib import Path

import numpy as np
import pytest
import torch

from qerl.metrics import Metrics, read_metrics


def test_lines_are_on_disk_at_once_and_survive_reopening(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    with Metrics(path) as metrics:
        metrics.log({"loss": torch.tensor(0.5), "reward": np.float32(2), "note": "x"}, step=1)
        assert [(line["step"], line["loss"], line["reward"], line["note"]) for line in read_metrics(path)] == [
            (1, 0.5, 2, "x")
        ]
    with Metrics(path) as metrics:
        metrics.log({"loss": 0.25}, step=2)
        metrics.log({"eval_reward": 1}, step=2)
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 2]


def test_nan_and_inf_stay_valid_json(tmp_path: Path) -> None:
    with Metrics(tmp_path / "m.jsonl") as metrics:
        metrics.log({"loss": float("nan"), "grad_norm": float("inf")}, step=0)
    line = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=pytest.fail)
    assert line["loss"] is None
    assert line["grad_norm"] is None


def test_a_line_cut_by_a_crash_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with Metrics(path) as metrics:
        metrics.log({"loss": 1.0}, step=1)
    path.write_text(path.read_text() + '{"step": 2, "lo')
    assert [line["step"] for line in read_metrics(path)] == [1]
    with Metrics(path) as metrics:
        metrics.log({"loss": 2.0}, step=2)
    assert [line["step"] for line in read_metrics(path)] == [1, 2]


def test_steps_never_go_back_and_values_are_plain(tmp_path: Path) -> None:
    with Metrics(tmp_path / "m.jsonl") as metrics:
        metrics.log({}, step=3)
        with pytest.raises(ValueError, match="step 2 come after step 3"):
            metrics.log({}, step=2)
        with pytest.raises(ValueError, match="'x' is a list"):
            metrics.log({"x": [1]}, step=3)
