"""Checkpoints of a run: folders that appear whole or not at all, the last few kept.

checkpoints/step-000050/   adapter/ (a PEFT folder; full training: weights.safetensors), optimizer.pt, state.json
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from qerl.model.adapter import load_adapter, save_adapter, trained_parameters
from qerl.model.decoder import Decoder
from qerl.model.trained import refresh

ADAPTER, WEIGHTS, OPTIMIZER, STATE = "adapter", "weights.safetensors", "optimizer.pt", "state.json"


@dataclass
class RunState:
    """Where a run is, at a rollout boundary. Random numbers are functions of the seed and these counts."""

    step: int = 0  # steps done
    updates: int = 0  # optimizer steps tried
    position: int = 0  # prompts drawn
    too_long: int = 0  # of them passed over
    num_tokens: int = 0  # trained on and sampled so far
    cache_blocks: int = 0  # of the engine, found once
    skipped_in_a_row: int = 0
    sigma: float = 0.0  # the closed loop's noise
    target: float | None = None  # and its target entropy
    seconds: float = 0.0  # of training so far
    before: dict[str, float] = field(default_factory=dict)  # evaluation before step 1
    watched: dict[str, float] = field(default_factory=dict)  # what the collapse watch remembers


def save(folder: Path, model: Decoder, optimizer: torch.optim.Optimizer, state: RunState, keep: int) -> Path:
    """Write checkpoints/step-N; returns it. One that is there already is left."""
    target = folder / f"step-{state.step:06d}"
    if target.exists():
        return target
    partial = folder / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if model.lora is not None:
        save_adapter(model, partial / ADAPTER)
    else:
        tensors = {name: p.detach().cpu().contiguous() for name, p in trained_parameters(model).items()}
        save_file(tensors, partial / WEIGHTS)
    torch.save(optimizer.state_dict(), partial / OPTIMIZER)
    (partial / STATE).write_text(json.dumps(asdict(state), indent=1))
    _flush(partial)
    os.rename(partial, target)
    _flush_folder(folder)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def restore(folder: Path, model: Decoder, optimizer: torch.optim.Optimizer) -> RunState:
    """Weights and optimizer in place; returns the state."""
    if model.lora is not None:
        load_adapter(model, folder / ADAPTER)
    else:
        stored = load_file(folder / WEIGHTS)
        with torch.no_grad():
            for name, parameter in trained_parameters(model).items():
                parameter.copy_(stored[name])
        refresh(model)
    optimizer.load_state_dict(torch.load(folder / OPTIMIZER, map_location=model.device, weights_only=True))
    return read_state(folder)


def read_state(folder: Path) -> RunState:
    values: dict[str, Any] = json.loads((folder / STATE).read_text())
    return RunState(**values)


def _flush(folder: Path) -> None:
    """Everything below is on disk, not only in the system's cache."""
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            _flush_folder(path)
        else:
            with open(path, "rb") as file:
                os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
