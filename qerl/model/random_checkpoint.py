"""A checkpoint folder with random weights of a named shape: for benchmarks, demonstrations and tests."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from qerl.model.shapes import Shape
from qerl.quant.checkpoint import SINGLE
from qerl.quant.partial import require_new, writable
from qerl.quant.safetensors_io import Writer

PIECE = 1 << 22
STD = 0.02  # initializer_range of the Qwen2 family


def write_random_checkpoint(
    shape: Shape, out: Path, seed: int = 0, on_bytes: Callable[[int], None] = lambda n: None
) -> None:
    """Matrices N(0, .02), gains 1, biases 0, in bf16; made in a temporary folder, then renamed."""
    require_new(out)
    partial = out.with_name(out.name + ".partial")
    with writable(partial):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    try:
        with writable(partial):
            writer = Writer(partial / SINGLE, shape.tensors())
    except ValueError:
        shutil.rmtree(partial)
        raise
    try:
        for name, spec in shape.tensors().items():
            for start in range(0, spec.numel, PIECE):
                n = min(PIECE, spec.numel - start)
                if len(spec.shape) == 2:
                    piece = torch.randn(n, generator=generator, dtype=torch.float32) * STD
                else:
                    piece = torch.full((n,), 0.0 if name.endswith(".bias") else 1.0, dtype=torch.float32)
                writer.append(name, piece.to(spec.dtype))
                on_bytes(n * spec.dtype.itemsize)
        writer.close()
    except BaseException:
        writer.abandon()
        shutil.rmtree(partial)
        raise
    (partial / "config.json").write_text(json.dumps(shape.config(), indent=2))
    os.replace(partial, out)
