"""What an evaluation is asked for, and which of it makes its results what they are."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl.model.adapter import CONFIG, WEIGHTS, read_settings
from qerl.model.loader import architecture_in, require_base
from qerl.quant.checkpoint import resolve
from qerl.records import require_temperature


@dataclass(frozen=True)
class Job:
    """Greedy by default; with k samples a question there must be a temperature."""

    model: str  # folder or hub id
    tasks: tuple[str, ...]
    adapter: Path | None = None  # PEFT folder
    base: str = "nvfp4"
    dtype: str | None = None  # by device
    device: str | None = None
    k: int = 1  # samples a question
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 1024
    seed: int = 0
    limit: int | None = None  # only the first questions of each task
    system_prompt: str | None = None  # instead of the task's own; empty: none
    data_dir: Path | None = None
    reward: str | None = None  # instead of the task's own
    out: Path | None = None  # folder of the results; by default a name made of the settings
    workers: int = 2  # processes that grade
    unsafe_code: bool = False  # run programs without a sandbox

    def __post_init__(self) -> None:
        require_base(self.base)
        if not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise ValueError("Name one or more tasks, each once, such as --task gsm8k,math500.")
        if self.k < 1 or (self.limit is not None and self.limit < 1):
            raise ValueError("k and limit must be at least 1.")
        if self.k > 1 and self.temperature == 0:
            raise ValueError(f"Greedy samples are all the same: give a temperature for k={self.k}, or drop k.")
        require_temperature(self.temperature, self.top_p, self.top_k, self.min_p)

    def settings(self) -> dict[str, Any]:
        """What the results depend on. Other tasks, more questions or more samples add to a folder of results; anything
        that stands here makes it another one."""
        return {
            "model": self.model,
            "weights": _weights(resolve(self.model, architecture_in)),
            "adapter": None if self.adapter is None else str(self.adapter),
            "adapter_sha256": None if self.adapter is None else _adapter(self.adapter),
            "base": self.base,
            "dtype": self.dtype,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            **({"min_p": self.min_p} if self.min_p else {}),
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "system_prompt": self.system_prompt,
            "reward": self.reward,
        }

    def folder(self) -> Path:
        if self.out is not None:
            return self.out
        digest = hashlib.sha256(json.dumps(self.settings()).encode()).hexdigest()[:8]
        tasks = "+".join(Path(task).stem for task in self.tasks) if len(self.tasks) < 4 else f"{len(self.tasks)}-tasks"
        drawn = "greedy" if self.temperature == 0 else f"t{self.temperature:g}"
        parts = (Path(self.model).name or "model", self.base, *(["adapter"] if self.adapter else []), tasks, drawn)
        return Path("evals") / re.sub(r"[^A-Za-z0-9._+-]+", "-", "-".join((*parts, digest)))


def _weights(folder: Path) -> str:
    """A checkpoint's files by name, size and time, so that other weights in the same folder are noticed."""
    files = sorted(folder.glob("*.safetensors"))
    listed = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:16]


def _adapter(folder: Path) -> str:
    read_settings(folder)  # its own message where this is no adapter
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}.")
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()
