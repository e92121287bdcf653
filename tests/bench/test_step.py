import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from qerl.bench.clock import Clock
from qerl.bench.operations import pass_operations
from qerl.bench.step import Steps
from qerl.bench.step import measure as whole
from qerl.bench.training import Passes
from qerl.bench.training import measure as passes
from qerl.cli import app
from qerl.model.shapes import SHAPES, shape_named


def quiet(message: str) -> None:
    pass


def test_operations_of_a_7b_are_six_a_weight_and_token_with_recomputation() -> None:
    shape = SHAPES["qwen2.5-7b"]
    weights = sum(spec.numel for name, spec in shape.tensors().items() if name.endswith("_proj.weight"))
    tokens = 8192
    plain = pass_operations(shape, 0, [1] * tokens, 0, 0)
    assert plain == pytest.approx(4 * weights * tokens, rel=0.01)
    again = pass_operations(shape, 0, [1] * tokens, 0, shape.layers)
    down = shape.layers * shape.hidden * shape.intermediate
    assert again - plain == pytest.approx(2 * (weights - down) * tokens, rel=0.01)
    head = pass_operations(shape, 0, [1] * tokens, 100, 0) - plain
    assert head == pytest.approx(4 * 100 * shape.vocab * shape.hidden)
    # one long sequence attends more than many short ones
    assert pass_operations(shape, 32, [tokens], 0, 0) > pass_operations(shape, 32, [64] * (tokens // 64), 0, 0) > plain


def test_parts_within_parts_count_once() -> None:
    class Counting(Clock):
        looks = 0

        def _now(self) -> float:
            self.looks += 1
            return float(self.looks)

    clock = Counting(torch.device("cpu"))
    with clock.part("outer"):
        with clock.part("inner"):
            pass
        with clock.part("inner"):
            pass
    assert dict(clock.seconds) == {"inner": 2.0, "outer": 3.0}


def test_training_passes_are_measured_with_their_ratio_to_bf16() -> None:
    job = Passes(["toy"], ["nvfp4", "bf16"], [48], 20, 4, "2", 1, "cpu")
    rows = list(passes(job, quiet))
    assert [(row["base"], row["tokens"], row["recomputed"]) for row in rows] == [("bf16", 48, 2), ("nvfp4", 48, 2)]
    assert rows[0]["x_bf16"] == 1
    assert all(row["tokens_per_s"] > 0 and row["plan_gb"] > 0 for row in rows)
    with pytest.raises(ValueError, match="auto, all, none or a number"):
        next(passes(Passes(["toy"], ["bf16"], [48], 20, 4, "some", 1, "cpu"), quiet))


def test_a_whole_step_goes_through_the_trainer() -> None:
    job = Steps(["toy"], ["bf16"], [2], 2, 2, 6, 5, 4, "auto", 64, 2, updates=2, device="cpu")
    (row,) = whole(job, quiet)
    parts = [row[f"{name}_s"] for name in ("rollout", "forward", "backward", "old_logprobs", "optimizer")]
    assert all(part > 0 for part in parts)
    assert row["step_s"] >= sum(parts) - 0.01
    assert row["rollout_tokens_per_s"] == pytest.approx(2 * 2 * 5 / row["rollout_s"], rel=0.01)
    assert row["trained_tokens"] == 2 * (6 + 2 * 5)  # a prompt once for both its completions
    assert row["train_tokens_per_s"] == pytest.approx(32 / (row["forward_s"] + row["backward_s"]), rel=0.05)


def test_the_command_prints_a_table_and_json_and_writes_rows(tmp_path: Path) -> None:
    words = "bench step --device cpu --base bf16 --tokens 32,64 --segment 16 --repeats 1 --rank 4 --recompute none"
    done = CliRunner().invoke(app, [*words.split(), "--csv", str(tmp_path / "rows.csv")])
    assert done.exit_code == 0, done.output
    assert "tokens_per_s" in done.stdout
    assert len(json.loads(done.stdout.splitlines()[-1])["rows"]) == 2
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 3


def test_no_more_is_in_flight_than_there_is() -> None:
    job = Steps(["toy"], ["bf16"], [3, 8, 128], 2, 2, 6, 5, 4, "auto", 64, 2, device="cpu")
    assert [row["running"] for row in whole(job, quiet)] == [3, 4]


@pytest.mark.gpu
def test_memory_is_as_planned_and_flat() -> None:
    job = Steps(["qwen2.5-0.5b"], ["nvfp4"], [8], 4, 4, 64, 64, 32, "2", 1024, 6)
    (row,) = whole(job, print)
    assert row["allocated_gb_step3"] == row["allocated_gb_last"]
    assert row["recomputed"] == 2 < shape_named("qwen2.5-0.5b").layers
    assert abs(row["plan_off"]) < 0.1
    assert row["device_gb"] < 10
