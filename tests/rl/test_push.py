"""The folder that an adapter is shared as, read back by the hub's library and by PEFT; failed pushes lose nothing."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from typer.testing import CliRunner

import qerl
from qerl.cli import app
from qerl.recipe import load_config
from qerl.rl.card import base_name, front_matter
from qerl.rl.push import shared_folder, upload
from tests.rl.test_trainer import few_threads, tiny_job  # noqa: F401 (a fixture)

SMALL = ("max_steps=2", "prompts_per_step=2", "num_generations=2", "eval_size=4", "save_steps=1")


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers at the hub's address."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", "hf_none")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("push") / "sums"
    qerl.train(tiny_job(folder, *SMALL))
    return folder


def test_a_run_leaves_an_adapter_with_its_card(run: Path, tmp_path: Path) -> None:
    from peft import PeftConfig

    card = ModelCard.load(run / "adapter" / "README.md")
    data = card.data.to_dict()
    assert data["library_name"] == "peft"
    assert {"qerl", "lora", "nvfp4"} <= set(data["tags"])
    assert "| accuracy | " in card.text
    assert "![reward](plots/reward.png)" in card.text
    assert (run / "adapter" / "plots" / "reward.png").stat().st_size > 1000
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(card.text.partition("```yaml\n")[2].partition("```")[0])
    again = load_config(recipe, ["model=tiny"])
    assert again.learning_rate == load_config(run / "config.yaml").learning_rate
    assert again.prompts_per_step == 2
    everything = "".join(path.read_text() for path in (run / "adapter").iterdir() if path.suffix in (".md", ".json"))
    assert str(run.parent) not in everything, "nothing of this machine"
    assert PeftConfig.from_pretrained(run / "adapter").base_model_name_or_path == "qerl-tiny"
    newest = run / "checkpoints" / "step-000002" / "adapter" / "adapter_model.safetensors"
    assert (run / "adapter" / newest.name).read_bytes() == newest.read_bytes()


def test_a_run_a_checkpoint_or_an_adapter_may_be_pushed(run: Path, tmp_path: Path) -> None:
    older = run / "checkpoints" / "step-000001"
    final = {path: path.read_bytes() for path in (run / "adapter").rglob("*") if path.is_file()}
    for place in (older, older / "adapter"):
        card = (shared_folder(place) / "README.md").read_text()
        assert "1 step," in card
        assert "None was made of this step." in card, "an evaluation of step 2 says nothing of step 1"
        assert not list(older.rglob("README.md")), "the checkpoint is as it was"
    assert final == {path: path.read_bytes() for path in (run / "adapter").rglob("*") if path.is_file()}
    assert "2 steps" in (shared_folder(run) / "README.md").read_text()
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (bare / name).write_bytes((run / "adapter" / name).read_bytes())
    settings = json.loads((bare / "adapter_config.json").read_text())
    (bare / "adapter_config.json").write_text(
        json.dumps(settings | {"base_model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct"})
    )
    assert ModelCard.load(shared_folder(bare) / "README.md").data.base_model == "Qwen/Qwen2.5-0.5B-Instruct"
    (bare / "README.md").write_text("mine")
    assert (shared_folder(bare) / "README.md").read_text() == "mine"
    with pytest.raises(ValueError, match="neither a run's folder nor a PEFT adapter"):
        shared_folder(tmp_path)
    (tmp_path / "config.yaml").write_text("model: tiny\n")
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        shared_folder(tmp_path)


def test_a_dry_run_names_the_repository_and_leaves_the_run_alone(run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for place in (run / "checkpoints" / "step-000001", run / "adapter"):
        done = CliRunner().invoke(app, ["push", str(place), "me/sums", "--dry-run"])
        folder = Path(json.loads(done.stdout.splitlines()[-1])["folder"])
        card = (folder / "README.md").read_text()
        assert 'from_pretrained(base, "me/sums")' in card
        assert "the model shipped with qerl" in card
        assert "On the base in 16 bits, as below, it is a slightly different model" in card
        shutil.rmtree(folder.parent)
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    done = CliRunner().invoke(app, ["push", str(run), "not a name", "--dry-run"])
    assert "'not a name' is no name for a repository" in str(done.exception)


def test_a_damaged_checkpoint_is_not_shared(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "sums"
    shutil.copytree(run, copy)
    weights = copy / "checkpoints" / "step-000002" / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert "1 step" in (shared_folder(copy) / "README.md").read_text()
    with pytest.raises(ValueError, match=r"No checkpoint of .* is whole"):
        shared_folder(copy / "checkpoints" / "step-000002")


def test_only_hub_ids_are_bases_for_the_hub(tmp_path: Path) -> None:
    assert yaml.safe_load(front_matter("Qwen/Qwen3-4B", []).strip("-\n"))["base_model"] == "Qwen/Qwen3-4B"
    assert "base_model" not in front_matter(str(tmp_path), [])
    assert base_name(str(tmp_path / "Qwen3-4B-NVFP4")) == "Qwen3-4B-NVFP4"


@pytest.mark.usefixtures("no_hub")
def test_a_push_that_fails_says_how_to_try_again(run: Path) -> None:
    done = CliRunner().invoke(app, ["push", str(run), "me/sums", "--dry-run"])
    assert json.loads(done.stdout.splitlines()[-1])["address"] is None
    with pytest.raises(ValueError, match="Nothing is lost") as failed:
        upload(run / "adapter", "me/sums", private=True)
    assert f"qerl push {run / 'adapter'} me/sums --private" in str(failed.value)
    assert "a way to the hub" in str(failed.value), "nobody answers; a login would not help"
    with pytest.raises(ValueError, match="Could not push to not a name"):
        upload(run / "adapter", "not a name")
    done = CliRunner().invoke(app, ["push", str(run), "me/sums"])
    assert isinstance(done.exception, ValueError)  # which the command ends in one message


@pytest.mark.usefixtures("no_hub")
def test_a_run_whose_push_fails_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("max_steps=1", "eval_size=0", "max_completion_length=8", "push_to_hub=true", "hub_model_id=me/sums")
    result = qerl.train(tiny_job(tmp_path / "run", *SMALL, *words))
    assert (result.steps, result.pushed) == (1, None)
    assert "qerl push" in capsys.readouterr().err
    assert (tmp_path / "run" / "adapter" / "README.md").exists()


def test_a_run_that_is_to_be_pushed_needs_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ValueError, match="hf auth login"):
        qerl.train(tiny_job(tmp_path / "run", "push_to_hub=true"))
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="uploads adapters"):
        tiny_job(tmp_path / "run", "push_to_hub=true", "base=full")
