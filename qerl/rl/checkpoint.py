"""Checkpoints of a run: folders that appear whole or not at all, the last few kept.

checkpoints/step-000050/   adapter/ (a PEFT folder; full training: weights.safetensors), optimizer.safetensors,
                           state.json, checksums.json
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from qerl.model.adapter import load_adapter, save_adapter, trained_parameters
from qerl.model.decoder import Decoder
from qerl.model.trained import refresh
from qerl.quant.partial import flush_folder
from qerl.rl.folder import CHECKPOINTS

ADAPTER, WEIGHTS, OPTIMIZER = "adapter", "weights.safetensors", "optimizer.safetensors"
STATE, CHECKSUMS = "state.json", "checksums.json"


@dataclass
class RunState:
    """Where a run is, at a rollout boundary. Random numbers are functions of the seed and these counts."""

    step: int = 0  # steps done
    position: int = 0  # prompts drawn
    too_long: int = 0  # of them passed over
    num_tokens: int = 0  # of all that was drawn: completions, and each one's prompt
    cache_blocks: int = 0  # of the engine, found once
    skipped_in_a_row: int = 0
    sigma: float = 0.0  # the closed loop's noise
    target: float | None = None  # and its target entropy
    evaluated: int = -1  # the last step that was
    before: dict[str, float] = field(default_factory=dict)  # evaluation before step 1
    after: dict[str, float] = field(default_factory=dict)  # and the last one
    watched: dict[str, float] = field(default_factory=dict)  # what the collapse watch remembers
    ranks: int = 1  # processes that the cache was sized for
    rows: int = 0  # of the training data, and
    rewards: list[str] = field(default_factory=list)  # the functions' names: a resumed run must have the same


def save(folder: Path, model: Decoder, optimizer: torch.optim.Optimizer, state: RunState, keep: int) -> Path:
    """Write checkpoints/step-N; returns it. One that is there already is left. On any failure (a full disk: OSError)
    the others are untouched."""
    target = path_of(folder, state.step)
    if target.exists():
        return target
    for left in folder.glob(".step-*"):  # by a process that was killed here
        shutil.rmtree(left)
    partial = folder / f".{target.name}.partial"
    partial.mkdir(parents=True)
    try:
        _write(partial, model, optimizer, state)
        os.rename(partial, target)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, SafetensorError) and (found := re.search(r"os error (\d+)", str(error))):
            number = int(found[1])  # all that safetensors tells of the system's error
            raise OSError(number, os.strerror(number), str(target)) from error
        raise
    flush_folder(folder)
    for old in checkpoints(folder)[:-keep]:
        doomed = old.with_name(f".{old.name}.old")
        old.rename(doomed)  # never a half-deleted one by its name
        shutil.rmtree(doomed)
    return target


def _write(partial: Path, model: Decoder, optimizer: torch.optim.Optimizer, state: RunState) -> None:
    if model.lora is not None:
        save_adapter(model, partial / ADAPTER)
    else:
        tensors = {name: p.detach().cpu().contiguous() for name, p in trained_parameters(model).items()}
        save_file(tensors, partial / WEIGHTS)
    tensors, plain = _split(optimizer.state_dict())
    save_file(tensors, partial / OPTIMIZER)
    (partial / STATE).write_text(json.dumps({"run": asdict(state), "optimizer": plain}, indent=1))
    (partial / CHECKSUMS).write_text(json.dumps(_checksums(partial), indent=1))
    _flush(partial)


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def damage(folder: Path) -> str:
    """What is wrong with a checkpoint; empty if nothing is."""
    try:
        expected = json.loads((folder / CHECKSUMS).read_text())
        found = _checksums(folder)
    except (OSError, ValueError) as error:
        return str(error)
    odd = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    return f"{odd[0]} is missing, new or changed" if odd else ""


def find_checkpoint(source: Path) -> Path:
    """source itself, where it is a checkpoint; of a run the newest whole one. Nothing is put aside: the run may
    still be going on."""
    found = checkpoints(source / CHECKPOINTS)
    if not (source / CHECKPOINTS).is_dir() and ((source / STATE).is_file() or (source / CHECKSUMS).is_file()):
        found = [source]
    for path in reversed(found):
        if not damage(path):
            return path
    if found:
        raise ValueError(f"No checkpoint of {source} is whole: {damage(found[-1])} in {found[-1].name}.")
    raise ValueError(f"{source} holds no checkpoint. Name a run's output_dir, a checkpoint in it, or an adapter.")


def newest_whole(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The newest undamaged checkpoint; None: there is none. Damaged ones are said aloud and put aside."""
    for path in reversed(checkpoints(folder)):
        if not (problem := damage(path)):
            return path
        aside = path.with_name(f"damaged-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        before = "the one before is taken" if checkpoints(folder) else "none is left"
        say(f"The checkpoint {path} is damaged ({problem}); it was put aside as {aside.name}, {before}.")
    return None


def require_some(folder: Path) -> None:
    """Refuse to start a run over because all of its checkpoints are damaged: that would drop what it has written."""
    if any(folder.glob("damaged-*")):
        raise ValueError(
            f"No whole checkpoint is left in {folder}. Start a new run in another output_dir; or delete that folder, "
            "and --resume starts this one over."
        )


def restore(folder: Path, model: Decoder, optimizer: torch.optim.Optimizer) -> RunState:
    """Weights and optimizer in place; returns the state. Only safetensors and JSON are read."""
    if model.lora is not None:
        load_adapter(model, folder / ADAPTER)
    else:
        load_full(model, folder / WEIGHTS)
    state = json.loads((folder / STATE).read_text())
    optimizer.load_state_dict(_joined(load_file(folder / OPTIMIZER), state["optimizer"]))
    return RunState(**state["run"])


def load_full(model: Decoder, path: Path) -> None:
    """Weights of full training, in place."""
    stored = load_file(path)
    with torch.no_grad():
        for name, parameter in trained_parameters(model).items():
            parameter.copy_(stored[name])
    refresh(model)


def _split(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state as tensors by path, and the rest as JSON. (8-bit optimizers nest dictionaries.)"""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {"groups": state["param_groups"], "values": {}}

    def walk(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{path}/{key}", inner)
        elif isinstance(value, Tensor):
            tensors[path] = value.detach().cpu().clone()  # some optimizers share tables
        else:
            plain["values"][path] = value

    for parameter, values in state["state"].items():
        walk(str(parameter), values)
    return tensors, plain


def _joined(tensors: dict[str, Tensor], plain: dict[str, Any]) -> dict[str, Any]:
    state: dict[Any, Any] = {}
    for path, value in {**tensors, **plain["values"]}.items():
        first, *between, last = path.split("/")
        inner = state.setdefault(int(first), {})
        for key in between:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return {"state": state, "param_groups": plain["groups"]}


def _checksums(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != CHECKSUMS:
            with open(path, "rb") as file:
                found[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _flush(folder: Path) -> None:
    """Everything below is on disk, not only in the system's cache."""
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            flush_folder(path)
        else:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
