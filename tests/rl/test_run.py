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


def test_what_does_not_fit_the_model_or_is_not_installed_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_model_folder(), tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(
        ValueError, match="make 1016 tokens; the model's context is 256"
    ):  # not that weights are missing
        build(tiny_job(tmp_path / "run", "max_completion_length=1000", f"model={tmp_path / 'model'}"))
    for setting, message in (
        ("recompute=99", "recompute=99: the model has 4 blocks"),
        ("lora_target_modules=[q_proj,qproj]", "LoRA target 'qproj' matches nothing"),
        ("noise.profile=[1.0,1.0]", "noise.profile needs 4 factors"),
    ):
        with pytest.raises(ValueError, match=message):
            build(tiny_job(tmp_path / "run", setting, f"model={tmp_path / 'model'}"))
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="has no tokenizer"):
        build(tiny_job(tmp_path / "run", f"model={tmp_path / 'model'}"))
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # as if it were not installed
    with pytest.raises(ValueError, match="needs bitsandbytes: pip install bitsandbytes, or use optim=adamw"):
        build(tiny_job(tmp_path / "run", "optim=adamw_8bit", "model=nobody/no-such-model"))
