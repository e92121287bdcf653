"""The benchmarks of rollouts on the toy shape: what rows say, never how fast anything was."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from qerl.bench import decode, logprobs, prefill, startup
from qerl.cli import app
from qerl.engine.engine import Engine
from qerl.model.loader import load
from qerl.model.random_checkpoint import write_random_checkpoint
from qerl.model.shapes import SHAPES

COLUMNS = (
    *("model", "base", "rank", "batch", "prompt", "new_tokens", "kv_cache_dtype", "prefill_ms", "tokens_per_s"),
    *("step_ms", "floor_ms", "of_floor", "timed", "peak_gb"),
)


def test_every_combination_is_a_row_and_long_traces_are_integrated() -> None:
    work = decode.Table(("toy",), ("bf16", "nf4"), (0, 8), (1, 3), (4, 40), prompt=8, run_up_to=8, device="cpu")
    rows = list(decode.measure(work, lambda message: None))
    assert [(r["base"], r["rank"], r["batch"], r["new_tokens"]) for r in rows] == [
        (base, rank, batch, new) for base in ("bf16", "nf4") for rank in (0, 8) for batch in (1, 3) for new in (4, 40)
    ]
    assert {tuple(row) for row in rows} == {COLUMNS}
    assert {(row["new_tokens"], row["timed"]) for row in rows} == {(4, "every step"), (40, "5 contexts")}
    assert all(row["tokens_per_s"] > 0 and row["step_ms"] > 0 and row["peak_gb"] > 0 for row in rows)


def test_an_interruption_is_no_measurement() -> None:
    table = decode.Table(("toy",), ("bf16",), (0,), (2,), (64,), prompt=8, run_up_to=64, device="cpu")

    def say(text: str) -> None:
        if "decode steps are" in text:  # the next thing is the run that counts
            signal.setitimer(signal.ITIMER_REAL, 0.001)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(decode.measure(table, say))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_what_does_not_fit_is_said_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("qerl.engine.cache.CPU_BYTES", 1 << 20)
    work = decode.Table(("toy",), ("bf16",), (0,), (1, 64), (4, 1000), prompt=8, run_up_to=8, device="cpu")
    rows = list(decode.measure(work, said.append))
    assert [(row["batch"], row["new_tokens"]) for row in rows] == [(1, 4)]
    assert sum("does not fit" in message for message in said) == 3


def test_a_step_at_a_context_reads_that_context() -> None:
    model = decode.random_model("toy", "bf16", 0, torch.device("cpu"))
    engine = Engine(model, 64, 16, max_running=2)
    engine.cache.both.fill_(float("nan"))  # what is read shows in the logits, and nothing is written that far back
    assert decode.step_seconds(engine, 2, 100) > 0
    assert engine.batch.numbers[1, :2].tolist() == [100, 100]  # the position after the step
    assert torch.isnan(engine.batch.logprobs[0, 0, :2]).all()


def test_layers_of_a_repeated_model_are_equal_and_apart() -> None:
    model = decode.random_model("toy", "nvfp4", 8, torch.device("cpu"))
    first, second = (model.blocks[i].mlp.down.weight for i in range(2))
    assert torch.equal(first.kept, second.kept)
    assert first.kept.data_ptr() != second.kept.data_ptr()
    assert first.scratch is second.scratch  # memory for one dequantized weight is there once
    assert model.blocks[0].mlp.down.lora["down_proj"].a.master.shape == (8, 768)


def test_groups_and_separate_prompts() -> None:
    rows = list(prefill.measure("toy", "bf16", 0, (2, 3), 20, "cpu", lambda message: None))
    assert [(row["prompts"], row["samples"]) for row in rows] == [(2, 3), (6, 1)]
    assert all(row["ms"] > 0 for row in rows)


def test_start_up_has_its_moments_in_order(tmp_path: Path) -> None:
    write_random_checkpoint(SHAPES["toy"], tmp_path / "model", base="nvfp4")
    found = startup.moments(str(tmp_path / "model"), "cpu", 0.0)
    assert list(found) == ["imported_s", "loaded_s", "engine_s", "first_token_s", "decoding_s"]
    assert list(found.values()) == sorted(found.values())


def test_a_random_nvfp4_checkpoint_is_a_random_model(tmp_path: Path) -> None:
    write_random_checkpoint(SHAPES["toy"], tmp_path / "model", base="nvfp4")
    weight = load(str(tmp_path / "model"), "nvfp4", "cpu").blocks[1].mlp.gate_up.weight.kept
    assert weight.shape == (1536, 256)
    assert weight.std() == pytest.approx(0.02, rel=0.05)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]["ignore"] == ["lm_head"]
    with pytest.raises(ValueError, match="bf16 or nvfp4, not 'nf4'"):
        write_random_checkpoint(SHAPES["toy"], tmp_path / "other", base="nf4")


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_log_probs_of_sampler_and_trainer(cache: str) -> None:
    rows = list(logprobs.measure("toy", "nvfp4", 8, 0.05, 3, (10, 12), cache, "cpu", lambda message: None))
    assert [row["tokens"] for row in rows] == [36, 36]
    for row in rows:
        assert 0 <= row["mean"] <= row["max"]
        assert row["max"] < 1e-4 if cache == "auto" else 1e-4 < row["max"] < 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("base", ["nvfp4", "nf4", "bf16"])
def test_they_measure_on_a_gpu(base: str, record_property: Callable[[str, object], None]) -> None:
    work = decode.Table(("toy",), (base,), (16,), (4,), (32, 256), prompt=32, run_up_to=64, device="cuda")
    short, long = decode.measure(work, print)
    assert short["timed"] == "every step"
    assert long["timed"] == "5 contexts"
    scored, trained = logprobs.measure("qwen2.5-0.5b", base, 16, 0.01, 16, (64, 64), "auto", "cuda", print)
    for row in (scored, trained):  # measured here, and judged by tests/engine/test_engine_gpu.py
        record_property(f"{base}, {row['trainer']}: mean and max", (row["mean"], row["max"]))
        assert 0 < row["mean"] <= row["max"]


def test_the_command_takes_lists_and_ends_in_one_line_of_json(tmp_path: Path) -> None:
    csv = tmp_path / "rows.csv"
    words = "bench rollout --batch 1,2 --base bf16 --rank 0,8 --prompt 4 --device cpu --max-tokens 3"
    done = CliRunner().invoke(app, [*words.split(), "--csv", str(csv)])
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout.splitlines()[-1])["rows"]) == 4
    assert csv.read_text().splitlines()[0] == ",".join((*COLUMNS, "gpu", "commit"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--batch 1,x", "no list of numbers from 1 up"),
        ("--batch 1 --shape toy,qwen", "no shape 'qwen'"),
        ("--max-tokens 3,4", "belong to --batch"),
    ],
)
def test_what_makes_no_list_is_refused(words: str, message: str) -> None:
    error = CliRunner().invoke(app, ["bench", "rollout", *words.split()]).exception
    assert isinstance(error, ValueError)
    assert message in str(error)
