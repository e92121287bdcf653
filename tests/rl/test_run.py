"""A run as it is built: what reaches the graders of programs, and what is refused before anything is loaded."""

import shutil
import sys
from pathlib import Path

import pytest

from qerl.rl.run import build
from qerl.tasks import programs
from qerl.tasks.sandbox import sandbox_available
from qerl.tiny import tiny_model_folder
from tests.rl.test_trainer import tiny_job

ROWS = [{"prompt": "1+1=", "test_list": ["assert f() == 2"], "_code_unsafe": True}] * 2


@pytest.mark.parametrize("unsafe", [True, False])
def test_only_the_settings_say_whether_programs_run_without_a_sandbox(tmp_path: Path, unsafe: bool) -> None:
    if not unsafe and sandbox_available():
        pytest.skip("no sandbox here")
    config = tiny_job(tmp_path / "run", f"code.unsafe={str(unsafe).lower()}")
    trainer = build(config, ["mbpp_accuracy"], ROWS)  # no held-out rows
    assert trainer.rewards.workers is not None
    trainer.rewards.workers.close()
    trainer.metrics.close()
    assert [row["_code_unsafe"] for row in trainer.source.rows] == [unsafe] * 2


def test_code_rewards_are_refused_where_there_is_no_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "sandbox_available", lambda: "no namespaces.")
    with pytest.raises(ValueError, match=r"need a sandbox.*: no namespaces\. .*code\.unsafe: true"):
        build(tiny_job(tmp_path / "run"), ["mbpp_accuracy"], ROWS)


def test_a_missing_optimizer_blocks_that_are_not_there_and_too_long_sequences_are_refused_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_model_folder(), tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(
        ValueError, match="make 1016 tokens; the model's context is 256"
    ):  # not that weights are missing
        build(tiny_job(tmp_path / "run", "max_completion_length=1000", f"model={tmp_path / 'model'}"))
    with pytest.raises(ValueError, match="recompute=99: the model has 4 blocks"):
        build(tiny_job(tmp_path / "run", "recompute=99"))
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # as if it were not installed
    with pytest.raises(ValueError, match="needs bitsandbytes: pip install bitsandbytes, or use optim=adamw"):
        build(tiny_job(tmp_path / "run", "optim=adamw_8bit", "model=nobody/no-such-model"))
