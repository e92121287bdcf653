"""What vLLM needs: it refuses adapters with trained norms, so LoRA alone, and a base whose norms are the trained ones.

The base keeps its format. Files without a trained norm are linked, not copied, where the file system allows; in the
others only the norms' bytes are replaced.
"""

import errno
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from qerl.model.adapter import CONFIG as ADAPTER_CONFIG
from qerl.model.adapter import NORMS, PREFIX
from qerl.model.adapter import WEIGHTS as ADAPTER_WEIGHTS
from qerl.quant.checkpoint import INDEX, Checkpoint
from qerl.quant.convert import copy_companions
from qerl.quant.partial import require_space, write_json

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # values of --max-lora-rank


def is_norm(name: str) -> bool:
    return name.removesuffix(".weight").endswith(NORMS)


def write_pure_lora(adapter: Path, out: Path, base_name: str) -> None:
    """The adapter without its norms."""
    out.mkdir()
    tensors = {name: value for name, value in load_file(adapter / ADAPTER_WEIGHTS).items() if not is_norm(name)}
    save_file(tensors, out / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config = json.loads((adapter / ADAPTER_CONFIG).read_text())
    write_json(out / ADAPTER_CONFIG, config | {"modules_to_save": None, "base_model_name_or_path": base_name})


def write_base(source: Path, adapter: Path, out: Path) -> None:
    """The base folder with the adapter's norms, in the dtype that the base keeps norms in."""
    out.mkdir()
    stored = load_file(adapter / ADAPTER_WEIGHTS)
    norms = {name.removeprefix(PREFIX): value for name, value in stored.items() if is_norm(name)}
    with Checkpoint(source) as base:
        touched = {base.tensors[name].path for name in norms}
        require_space(out, sum(path.stat().st_size for path in touched))
        for path in sorted({where.path for where in base.tensors.values()}):
            if path in touched:
                shutil.copyfile(path, out / path.name)
            else:
                _link(path, out / path.name)
        for name, value in norms.items():
            where = base.tensors[name]
            raw = value.to(where.spec.dtype).contiguous().view(-1)
            with open(out / where.path.name, "r+b") as file:
                file.seek(where.offset)
                file.write(raw.view(torch.uint8).numpy().tobytes())
    for name in ("config.json", INDEX):
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
    copy_companions(source, out)


def _link(path: Path, to: Path) -> None:
    try:
        os.link(path.resolve(), to)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES):
            raise
        shutil.copyfile(path, to)


def serve_command(base: str, adapter: Path, rank: int) -> str:
    allowed = next((size for size in RANKS if size >= rank), rank)
    return f"vllm serve {base} --enable-lora --max-lora-rank {allowed} --lora-modules qerl={adapter}"
