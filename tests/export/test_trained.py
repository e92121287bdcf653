"""What is exported is found from a run, a checkpoint or an adapter; what can't be is refused with the remedy."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import peft
import pytest
import torch
import transformers

import qerl
from qerl.cli.export import export
from qerl.export.trained import find_trained
from qerl.tiny import tiny_model_folder
from tests.rl.test_trainer import tiny_job


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of two steps with a checkpoint after each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("runs") / "run"
    qerl.train(tiny_job(folder, "save_steps=1", "eval_size=0", "train_norms=true"))
    yield folder
    torch.set_num_threads(threads)


def test_a_run_its_checkpoint_and_its_adapter_are_the_same(run: Path) -> None:
    last = run / "checkpoints" / "step-000002"
    by_run = find_trained(run)
    assert by_run == find_trained(last) == find_trained(last / "adapter")
    assert find_trained(run / "adapter").run == run  # what is shared, beside the checkpoints
    assert (by_run.model, by_run.base, by_run.adapter, by_run.run) == ("tiny", "nvfp4", last / "adapter", run)
    assert find_trained(run / "checkpoints" / "step-000001").adapter == run / "checkpoints" / "step-000001" / "adapter"


def test_a_damaged_checkpoint_is_passed_over_and_left_where_it_is(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "checkpoints" / "step-000002" / "adapter" / "adapter_config.json").write_text("{}")
    assert find_trained(copy).origin.parent.name == "step-000001"
    assert (copy / "checkpoints" / "step-000002").is_dir()
    shutil.rmtree(copy / "checkpoints" / "step-000001")
    with pytest.raises(ValueError, match=r"No checkpoint of .* is whole"):
        find_trained(copy)


def test_an_adapter_from_elsewhere_needs_its_base_named(run: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(find_trained(run).origin, adapter)
    with pytest.raises(ValueError, match="give --base"):
        find_trained(adapter)
    assert find_trained(adapter, base="nvfp4").model == str(tiny_model_folder())
    (tmp_path / "home").mkdir()
    with pytest.raises(ValueError, match="home holds no checkpoint"):
        find_trained(tmp_path / "home")


def test_the_command_makes_a_model_that_transformers_and_peft_load(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(run, tmp_path / "merged", form="merged", device="cpu")
    shown = capsys.readouterr().out
    assert "likeliest token" in shown
    assert json.loads(shown.splitlines()[-1])["difference"]["same_token"] == 1.0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")("1+1=")["input_ids"]
    with pytest.raises(ValueError, match="drop --dtype, or ask for --form merged"):
        export(run, tmp_path / "adapter", dtype="float32")
    export(run, tmp_path / "adapter")
    assert "which vLLM refuses" in json.loads(capsys.readouterr().out.splitlines()[-1])["notes"][1]
    assert peft.PeftModel.from_pretrained(model, tmp_path / "adapter").peft_config


def test_what_can_not_be_is_refused(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="exists"):
        export(run, run)
    with pytest.raises(ValueError, match="no form 'gguf'"):
        export(run, out, form="gguf")
    with pytest.raises(ValueError, match="no dtype 'int8'"):
        export(run, out, form="merged", dtype="int8")
    with pytest.raises(ValueError, match="no --for ollama"):
        export(run, out, target="ollama")
    with pytest.raises(ValueError, match="drop --for vllm"):
        export(run, out, form="merged", target="vllm")
    with pytest.raises(ValueError, match="drop --no-check"):
        export(run, out, form="nvfp4", check=False)
    with pytest.raises(ValueError, match="There is no folder"):
        export(tmp_path / "none", out)
    assert not list(tmp_path.iterdir())
