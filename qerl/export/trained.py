"""What was trained, found from a run's folder, one of its checkpoints, or an adapter."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qerl.model.adapter import CONFIG as ADAPTER_CONFIG
from qerl.model.adapter import WEIGHTS as ADAPTER_WEIGHTS
from qerl.model.adapter import read_settings
from qerl.quant.checkpoint import read_config, resolve
from qerl.quant.layout import layout_of
from qerl.rl.checkpoint import ADAPTER, WEIGHTS, checkpoints, damage
from qerl.rl.folder import CHECKPOINTS, CONFIG


@dataclass(frozen=True)
class TrainedModel:
    """A base and what training made of it."""

    model: str  # folder or hub id of the base
    base: str  # its form: bf16, nvfp4, mxfp4, nf4; full where all weights were trained
    adapter: Path | None  # a PEFT folder, or
    weights: Path | None  # the file of full training
    run: Path | None  # the run that it comes from, if known

    @property
    def origin(self) -> Path:
        found = self.adapter or self.weights
        assert found is not None
        return found


def find_trained(source: Path, model: str | None = None, base: str | None = None) -> TrainedModel:
    """source: a run (its newest whole checkpoint counts), a checkpoint `step-N`, or a PEFT adapter folder.

    model and base stand in for what the run's settings say; an adapter from elsewhere needs base at least.
    """
    if not source.is_dir():
        raise ValueError(f"There is no folder {source}. Name a run's output_dir, a checkpoint in it, or an adapter.")
    run = _run_of(source)
    adapter: Path | None
    weights: Path | None
    if (source / ADAPTER_CONFIG).is_file():
        adapter, weights = source, None
    else:
        checkpoint = _checkpoint(source)
        adapter = checkpoint / ADAPTER if (checkpoint / ADAPTER).is_dir() else None
        weights = checkpoint / WEIGHTS if adapter is None else None
    stored = _settings(run) if run else {}
    if adapter is not None:
        read_settings(adapter)  # refuses what is no adapter of ours
        if not (adapter / ADAPTER_WEIGHTS).is_file():
            raise ValueError(f"{adapter} has no {ADAPTER_WEIGHTS}.")
        named = json.loads((adapter / ADAPTER_CONFIG).read_text()).get("base_model_name_or_path")
        stored = {"model": named} | stored
    model = model or stored.get("model")
    if not model:
        raise ValueError(f"{source} does not say which model it was trained on: give --model.")
    base = base or stored.get("base") or _base_of(model, source)
    if weights is not None and base != "full":
        raise ValueError(f"{source} holds weights of full training; drop --base {base}.")
    return TrainedModel(model, base, adapter, weights, run)


def _checkpoint(source: Path) -> Path:
    """The newest undamaged one; nothing is put aside, the run may still be going on."""
    inside = checkpoints(source / CHECKPOINTS)
    for path in reversed(inside):
        if not damage(path):
            return path
    if inside:
        raise ValueError(f"No checkpoint of {source} is whole: {damage(inside[-1])} in {inside[-1].name}.")
    holds = (source / ADAPTER).is_dir() or (source / WEIGHTS).is_file()
    why = damage(source) if holds else "it holds no checkpoint"
    if not why:
        return source
    raise ValueError(f"{source} can't be exported: {why}. Name a run's output_dir, a checkpoint in it, or an adapter.")


def _run_of(source: Path) -> Path | None:
    """The run's folder: the source itself, or that around a checkpoint or its adapter."""
    around = [source.absolute(), *source.absolute().parents][:4]
    return next((path for path in around if (path / CONFIG).is_file() and (path / CHECKPOINTS).is_dir()), None)


def _settings(run: Path) -> dict[str, Any]:
    try:
        stored = yaml.safe_load((run / CONFIG).read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{run / CONFIG} is not YAML: {error}") from error
    return stored if isinstance(stored, dict) else {}


def _base_of(model: str, source: Path) -> str:
    """A quantized model says itself; in which form a 16-bit one was trained on only the user knows."""
    if stored := read_config(resolve(model)).get("quantization_config"):
        return layout_of(stored).format
    raise ValueError(
        f"{source} does not say in which form it was trained on {model}: give --base bf16, nvfp4, mxfp4 or nf4."
    )
