"""A checkpoint folder with random weights of a named shape: for benchmarks, demonstrations and tests."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qerl.model.shapes import Shape
from qerl.quant.checkpoint import SINGLE
from qerl.quant.layout import layout_for
from qerl.quant.partial import require_new, writable
from qerl.quant.safetensors_io import Spec, Writer

PIECE = 1 << 22
STD = 0.02  # initializer_range of the Qwen2 family
BLOCK_SCALE, CODES_STD = 64.0, 2.9  # of NVFP4; what uniform E2M1 codes have


def write_random_checkpoint(
    shape: Shape, out: Path, seed: int = 0, on_bytes: Callable[[int], None] = lambda n: None, base: str = "bf16"
) -> None:
    """Matrices N(0, .02), gains 1, biases 0, in bf16; made in a temporary folder, then renamed.

    base nvfp4: linear layers are uniform codes with scales for the same deviation, and numbers repeat every PIECE.
    """
    require_new(out)
    specs, config = contents(shape, base)
    partial = out.with_name(out.name + ".partial")
    with writable(partial):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    try:
        with writable(partial):
            writer = Writer(partial / SINGLE, specs)
    except ValueError:
        shutil.rmtree(partial)
        raise
    repeated: dict[torch.dtype, Tensor] = {}
    try:
        for name, spec in specs.items():
            for start in range(0, spec.numel, PIECE):
                n = min(PIECE, spec.numel - start)
                if len(spec.shape) == 1:
                    piece = torch.full((n,), _constant(name), dtype=spec.dtype)
                elif base == "bf16":
                    piece = _matrix(spec.dtype, n, generator)
                else:
                    if spec.dtype not in repeated:
                        repeated[spec.dtype] = _matrix(spec.dtype, PIECE, generator)
                    piece = repeated[spec.dtype][:n]
                writer.append(name, piece)
                on_bytes(n * spec.dtype.itemsize)
        writer.close()
    except BaseException:
        writer.abandon()
        shutil.rmtree(partial)
        raise
    (partial / "config.json").write_text(json.dumps(config, indent=2))
    os.replace(partial, out)


def contents(shape: Shape, base: str = "bf16") -> tuple[dict[str, Spec], dict[str, Any]]:
    """The tensors of a checkpoint of this shape, and its config.json."""
    if base == "bf16":
        return shape.tensors(), shape.config()
    if base != "nvfp4":
        raise ValueError(f"Random checkpoints are bf16 or nvfp4, not {base!r}: quantize a bf16 one for others.")
    layout = layout_for(base)
    specs: dict[str, Spec] = {}
    for name, spec in shape.tensors().items():
        if name.endswith("_proj.weight"):
            module = name.removesuffix(".weight")
            specs |= {module + suffix: part for suffix, part in layout.specs(spec).items()}
        else:
            specs[name] = spec
    return specs, shape.config() | {"quantization_config": layout.config(["lm_head"], torch.bfloat16)}


def _constant(name: str) -> float:
    if name.endswith(".weight_global_scale"):
        return BLOCK_SCALE * CODES_STD / STD
    return 0.0 if name.endswith(".bias") else 1.0


def _matrix(dtype: torch.dtype, n: int, generator: torch.Generator) -> Tensor:
    if dtype == torch.uint8:
        return torch.randint(0, 256, (n,), dtype=dtype, generator=generator)
    if dtype == torch.float8_e4m3fn:
        return torch.full((n,), BLOCK_SCALE, dtype=torch.float32).to(dtype)
    return (torch.randn(n, generator=generator, dtype=torch.float32) * STD).to(dtype)
