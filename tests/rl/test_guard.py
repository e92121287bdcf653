"""Ctrl-C at the right moment, signs of collapse, the trial before step 1."""

import os
import signal
from pathlib import Path

import pytest

import qerl
from qerl.errors import Interrupted
from qerl.recipe import default_recipe, load_config
from qerl.rl import checkpoint
from qerl.rl.guard import CollapseWatch, Interrupts
from qerl.rl.run import build
from tests.rl.test_trainer import few_threads, tiny_job  # noqa: F401 (a fixture)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_shielded_work_is_finished_first_and_a_second_interrupt_breaks_it_off() -> None:
    said: list[str] = []
    with Interrupts(said.append) as interrupts:
        done = []
        with pytest.raises(KeyboardInterrupt), interrupts.shield("the update is done"):  # noqa: PT012
            interrupt()
            done.append(1)
        assert done == [1]
        assert said == ["Stopping once the update is done; again to break it off."]
        assert not interrupts.broken
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        with pytest.raises(KeyboardInterrupt), interrupts.shield("it is done"):  # noqa: PT012
            interrupt()
            interrupt()
        assert interrupts.broken


@pytest.mark.parametrize("place", ["update", "evaluation", "save"])
def test_a_signal_during_a_run_leaves_a_whole_step(tmp_path: Path, place: str) -> None:
    config = tiny_job(tmp_path / "run", "max_steps=3", "save_steps=2", "eval_steps=2")
    trainer = build(config)
    calls = []

    def once(function, at):
        def wrapped(*args, **kwargs):
            calls.append(1)
            if len(calls) == at:
                interrupt()
            return function(*args, **kwargs)

        return wrapped

    if place == "update":
        trainer.updater.step = once(trainer.updater.step, 2)
    elif place == "evaluation":
        trainer.evaluate = once(trainer.evaluate, 2)
    else:
        trainer.save = once(trainer.save, 1)
    with trainer.metrics, pytest.raises(Interrupted, match="Stopped after step 2 of 3"):
        trainer.train()
    (saved,) = checkpoint.checkpoints(tmp_path / "run" / "checkpoints")
    assert saved.name == "step-000002"
    assert checkpoint.damage(saved) == ""
    assert qerl.train(config, resume=True).steps == 3


def test_half_an_update_is_never_saved(tmp_path: Path) -> None:
    trainer = build(tiny_job(tmp_path / "run", "max_steps=3", "eval_size=0", "save_steps=1"))
    step, calls = trainer.updater.step, []

    def twice(*args):
        calls.append(1)
        result = step(*args)
        if len(calls) == 2:
            interrupt()
            interrupt()
        return result

    trainer.updater.step = twice
    with trainer.metrics, pytest.raises(Interrupted):
        trainer.train()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]


def test_a_step_that_was_done_is_saved_though_it_could_not_be_written_down(tmp_path: Path) -> None:
    config = tiny_job(tmp_path / "run", "max_steps=2", "eval_size=0")
    trainer = build(config)
    in_the_way = tmp_path / "run" / "completions"
    in_the_way.write_text("")  # a file, where the step's table needs a folder
    with trainer.metrics, pytest.raises(OSError, match="completions"):
        trainer.train()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]
    in_the_way.unlink()
    assert qerl.train(config, resume=True).steps == 2


def metrics(entropy: float = 1.0, reward: float = 0.5, length: float = 100.0, clipped: float = 0.0) -> dict[str, float]:
    names = ("entropy", "reward", "completions/mean_length", "completions/clipped_ratio")
    return dict(zip(names, (entropy, reward, length, clipped), strict=True))


@pytest.mark.parametrize(
    ("later", "words"),
    [
        ({"entropy": 0.05}, "hardly explores"),
        ({"reward": 0.0}, "may be collapsing"),
        ({"length": 10.0}, "completions shrank to 10 tokens"),
        ({"clipped": 0.95}, "95% of the completions are cut off"),
    ],
)
def test_signs_of_collapse_are_said_once(later: dict[str, float], words: str) -> None:
    watch = CollapseWatch()
    for step in range(1, 8):
        assert watch.check(step, metrics()) == []
    assert watch.check(8, metrics(entropy=float("nan"))) == []  # one bad number does not blind it
    said = [text for step in range(9, 20) for text in watch.check(step, metrics(**later))]
    assert len(said) == 1
    assert words in said[0]
    assert CollapseWatch(dict(watch.seen)).check(21, metrics(**later)) == []  # nor after a resume


def test_the_plan_says_what_was_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "max_steps=1",
        "micro_batch_tokens=200",
        "prompts_per_step=4",
        "num_generations=4",
        f"output_dir={tmp_path}/a",
    ]
    trainer = build(load_config(default_recipe(), words))
    tried = []
    real = trainer.updater.trial
    trainer.updater.trial = lambda samples, tally: (tried.extend(s.length for s in samples), real(samples, tally))
    from qerl.rl.guard import _try, preflight

    said = []
    assert preflight(trainer.config, trainer.updater, said.append)["tokens"] == sum(tried) == 16 + 72
    assert said == ["Trying the longest sequence, 88 tokens ..."]
    tried.clear()
    _try(trainer.config, trainer.updater, 200)
    assert tried == [88, 88, 16 + 40]  # of one prompt: 16 + 72 + 72 + 40
    assert "Tried 88 tokens at once" in " ".join(capsys.readouterr().err.split())
