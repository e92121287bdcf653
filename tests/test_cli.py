"""The command as a person runs it: in a process of its own where that matters, else in this one."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import qerl
from qerl.cli import app
from qerl.model.random_checkpoint import write_random_checkpoint
from qerl.model.shapes import Shape
from tests.conftest import Command


def qerl_command(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "qerl", *map(str, words)], capture_output=True, text=True, check=False)


def last_json(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_random_then_quantize_prints_tables_and_ends_in_json(tmp_path: Path, command: Command) -> None:
    made = last_json(command("random", "toy", tmp_path / "model"))
    assert made["parameters"] > 1e6
    done = qerl_command("quantize", tmp_path / "model", tmp_path / "out", "--method", "rtn", "--ignore", "*.layers.0.*")
    result = last_json(done)
    assert result["format"] == "nvfp4"
    assert result["method"] == "rtn"
    assert result["bits_per_weight"] == pytest.approx(4.5, abs=0.01)
    assert result["quantized_layers"] == 21
    assert "down_proj" in done.stdout
    assert "quantizing to nvfp4" in done.stderr
    assert (tmp_path / "out" / "quantize_report.json").exists()


def test_a_recipe_and_overrides_reach_quantize_and_flags_win(
    make_checkpoint: Callable[..., Path], tmp_path: Path, command: Command
) -> None:
    (tmp_path / "r.yaml").write_text("quantize:\n  format: mxfp4\n  method: rtn\n")
    source = make_checkpoint()
    result = last_json(
        command("quantize", source, tmp_path / "a", "--recipe", tmp_path / "r.yaml", "quantize.method=mse")
    )
    assert (result["format"], result["method"]) == ("mxfp4", "mse")
    result = last_json(command("quantize", source, tmp_path / "b", "-r", tmp_path / "r.yaml", "--format", "nf4"))
    assert (result["format"], result["method"]) == ("nf4", "rtn")


QUANTIZE = "quantize {model} {tmp}/out"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("quantize {tmp} {tmp}/out", "no config.json"),
        ("quantize {model} {model}", "exists"),
        (f"{QUANTIZE} --format int8", "quantize.format = 'int8' is not usable"),
        (f"{QUANTIZE} quantize.metod=rtn", "Did you mean quantize.method?"),
        (f"{QUANTIZE} --device cuda:77", "no device cuda:77"),
        (f"{QUANTIZE} --method awq --calibration {{tmp}}/t.txt --device cpu", "AWQ needs a GPU"),
        (f"{QUANTIZE} --method gptq --calibration {{tmp}}/none.txt", "no calibration file"),
        ("memory gpt-5", "There is no shape 'gpt-5'"),
        (
            "train --learning-rate 1e-4",
            "There is no option --learning-rate (--help lists them). A setting is written l",
        ),
    ],
)
def test_what_a_user_can_mend_ends_in_one_message(
    make_checkpoint: Callable[..., Path], tmp_path: Path, command: Command, line: str, message: str
) -> None:
    model = make_checkpoint()
    done = command(*line.format(tmp=tmp_path, model=model).split())
    assert done.returncode == 2
    assert message in re.sub(r"\s+", " ", done.stderr)
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("rollout --base bf16 --rank 8 --prompt 9", "Without --batch, nothing reads --base, --rank, --prompt: add"),
        ("rollout --run-up-to 9 --kv-cache-dtype fp8", "Without --batch, nothing reads --run-up-to, --kv-cache-dtype:"),
        ("rollout --base nvfp4", "nothing reads --base"),  # its default, but written
        ("rollout --batch 1 --samples 2 --prompts 3", "With --batch, nothing reads --prompts, --samples: leave out"),
        ("step --segment 16 --repeats 1 --profile", "Without --tokens, nothing reads --segment, --repeats, --profile:"),
        (
            "step --tokens 64 --prompts 1 --group 2 --prompt 3 --new 4",
            "nothing reads --prompts, --group, --prompt, --new",
        ),
        ("step --tokens 64 --running 1 --steps 2", "With --tokens, nothing reads --running, --steps: leave out"),
        ("step --tokens 64 --micro-batch 8 --updates 2 --limit-gb 9", "reads --micro-batch, --updates, --limit-gb:"),
        ("step --tokens 64 --profile --device cpu", "leave it out on a CPU"),
        ("step --limit-gb 9 --device cpu", "leave it out on a CPU"),
    ],
)
def test_an_option_that_a_bench_would_not_read_is_refused(line: str, message: str) -> None:
    error = CliRunner().invoke(app, ["bench", *line.split()]).exception
    assert isinstance(error, ValueError)
    assert message in str(error)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_with_a_message_and_the_command_can_be_repeated(
    tmp_path: Path, command: Command, number: signal.Signals
) -> None:
    write_random_checkpoint(Shape(512, 16, 2048, 8, 4, vocab=1024, tied=True, head_dim=64), tmp_path / "model")
    words = ["quantize", tmp_path / "model", tmp_path / "out", "quantize.max_shard_size=0.0005"]
    line = [sys.executable, "-m", "qerl", *map(str, words)]

    def listen() -> None:  # a test run in the background has Ctrl-C ignored, and its children with it
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    pipe = subprocess.PIPE
    process = subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, preexec_fn=listen)
    while not list((tmp_path / "out.partial").glob("*.safetensors")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, message = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Run the same command again" in re.sub(r"\s+", " ", message)
    assert "Traceback" not in message
    assert not (tmp_path / "out").exists()
    done = command(*words)
    assert "Resuming" in done.stderr
    assert last_json(done)["quantized_layers"] == 16 * 7


def test_config_prints_resolved_settings_with_help(command: Command) -> None:
    done = command("config", "quantize.method=rtn")
    assert last_json(done)["quantize.method"] == "rtn"
    assert "4-bit format" in re.sub(r"[\s│]+", " ", done.stdout)


def test_memory_prints_the_papers_table(command: Command) -> None:
    result = last_json(command("memory"))
    assert result["qwen2.5-7b"]["bf16"] == pytest.approx(15.2, rel=0.02)
    assert result["qwen2.5-7b"]["nvfp4"] == pytest.approx(5.9, rel=0.02)


def test_version_and_help() -> None:
    assert last_json(qerl_command("--version")) == {"version": qerl.__version__}
    assert "quantize" in qerl_command("--help").stdout


def test_of_several_ranks_the_first_alone_says_what_all_have(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for torchrun to end them, as it does when one has ended; what they live to say is theirs."""
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    first = command("train", "recompute=selective")
    assert (first.returncode, first.stderr.count("write auto, all, none")) == (2, 1)
    monkeypatch.setenv("RANK", "1")
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1)  # torchrun's signal
        second = command("train", "recompute=selective")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert (second.returncode, second.stderr) == (2, "")
    monkeypatch.setattr("qerl.cli.PATIENCE", 0.01)
    assert command("train", "recompute=selective").stderr == first.stderr
