"""The folder of a run: claimed by one process, its settings, and its files cut back to where a run resumes."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml

from qerl.config import Config, ConfigError
from qerl.metrics import read_metrics
from qerl.quant.partial import locked, writable, write_text
from qerl.recipe import load_config, settings
from qerl.tasks.task import FROM_PYTHON

METRICS, CONFIG, CHECKPOINTS, COMPLETIONS = "metrics.jsonl", "config.yaml", "checkpoints", "completions"
EVALUATION = "eval_runtime"  # a metric that every evaluation has, and nothing else
# What may change when a run is resumed; anything else would make it another run.
MAY_CHANGE = {
    *("output_dir", "device", "max_steps", "num_train_epochs", "logging_steps", "save_steps", "save_total_limit"),
    *("eval_steps", "log_completions", "micro_batch_tokens", "recompute", "report_to", "project"),
    *("push_to_hub", "hub_model_id", "hub_private_repo"),
}


@contextmanager
def claimed(output: Path, resume: bool) -> Iterator[None]:
    """Inside, the folder is this process's own. Refused are a run that would be overwritten, none to resume, a folder
    that can't be written, and a second process."""
    if resume and not (output / CONFIG).exists():
        raise ValueError(f"{output} holds no run to resume. Drop --resume, or name the run's output_dir.")
    with writable(output):
        output.mkdir(parents=True, exist_ok=True)
    try:
        with locked(output, f"Another process is at work in {output}. Wait for it, or name another."):
            with writable(output), tempfile.TemporaryFile(dir=output):
                pass  # a folder that is there may still be read-only
            if not resume and _used(output):
                raise ValueError(
                    f"{output} holds a run already. Go on with it (--resume), or name another output_dir=FOLDER."
                )
            yield
    finally:
        with suppress(OSError):
            output.rmdir()  # refused before anything was written


def cut_back(output: Path, step: int, evaluated: int) -> None:
    """Drop what was written after this step, and evaluations after the step `evaluated`: one that follows a checkpoint
    of the same step is made again."""
    path = output / METRICS
    if path.exists():
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        kept = [
            line
            for line, values in zip(lines, read_metrics(path), strict=True)
            if values["step"] <= (evaluated if EVALUATION in values else step)
        ]
        write_text(path, "".join(f"{line}\n" for line in kept))
    for file in (output / COMPLETIONS).glob("*.parquet*"):
        if file.suffix != ".parquet" or int(file.stem.removeprefix("step-")) > step:
            file.unlink()


def write_config(config: Config, output: Path) -> None:
    """All settings, as a recipe."""
    with writable(output):
        write_text(output / CONFIG, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))


def resumed_config(output: Path, overrides: Sequence[str]) -> Config:
    """The configuration of the run in a folder, with what may change changed."""
    path = output / CONFIG
    if not path.is_file():
        raise ConfigError(f"{output} holds no run to resume. Drop --resume, or name the run's output_dir.")
    config = load_config(path, [*overrides, f"output_dir={output}"])
    require_same(config, output)
    return config


def require_same(config: Config, output: Path) -> None:
    """Refuse to resume the run in a folder with settings that would make it another one."""
    before = {entry.key: entry.value for entry in settings(load_config(output / CONFIG))}
    free = MAY_CHANGE | ({"task"} if before["task"] == FROM_PYTHON else set())
    odd = [e.key for e in settings(config) if e.value != before[e.key] and e.key not in free]
    if odd:
        raise ConfigError(
            f"A resumed run goes on with its own settings; {', '.join(odd)} would make it another run. Start a new one "
            "in another output_dir."
        )


def _used(output: Path) -> bool:
    """Whether there is a run; what failed before a first step is none."""
    metrics = output / METRICS
    steps = [line["step"] for line in read_metrics(metrics)] if metrics.exists() else []
    return max(steps, default=0) > 0 or (output / CHECKPOINTS).exists()
