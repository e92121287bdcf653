"""How much memory loading takes, in bytes of a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qerl.model.random_checkpoint import write_random_checkpoint
from qerl.model.shapes import Shape
from qerl.quant.checkpoint import Checkpoint
from tests.quant.test_convert import run as quantize

SHAPE = Shape(1024, 6, 4096, 16, 4, vocab=8192, tied=True, head_dim=64)
LAYER = sum(spec.nbytes for name, spec in SHAPE.tensors().items() if name.startswith("model.layers.0."))  # 16-bit
COPIES = sum(spec.nbytes for name, spec in SHAPE.tensors().items() if name.endswith("_proj.weight"))

MEASURED = """
import sys
import torch
from qerl.bench.quantize import peak_resident_bytes
from qerl.model.loader import load, load_random
load_random("toy", base=sys.argv[2], device="cpu", dtype=torch.bfloat16)  # imports and first uses
before = peak_resident_bytes()
model = load(sys.argv[1], base=sys.argv[2], device="cpu", dtype=torch.bfloat16)
print(peak_resident_bytes() - before)
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a folder for each base, made of the same 16-bit weights."""
    folder = tmp_path_factory.mktemp("checkpoints")
    write_random_checkpoint(SHAPE, folder / "bf16")
    return folder


@pytest.mark.parametrize("base", ["bf16", "nvfp4"])
def test_loading_takes_the_model_and_at_most_one_layer_more(checkpoints: Path, base: str) -> None:
    if base != "bf16":
        quantize(checkpoints / "bf16", checkpoints / base, base)
    # On a CPU 4-bit layers keep a dequantized copy besides.
    model = Checkpoint(checkpoints / base).nbytes + (COPIES if base != "bf16" else 0)
    taken = taken_by_loading(checkpoints / base, base)
    if taken >= model + LAYER:  # what else the machine does only adds to it: a second run tells
        taken = min(taken, taken_by_loading(checkpoints / base, base))
    assert 0.8 * model < taken < model + LAYER


def taken_by_loading(folder: Path, base: str) -> int:
    command = [sys.executable, "-c", MEASURED, str(folder), base]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


@pytest.mark.gpu
@pytest.mark.parametrize("base", ["bf16", "nvfp4", "mxfp4", "nf4"])
def test_loading_to_the_gpu_takes_the_packed_model_and_at_most_one_layer_more(tmp_path: Path, base: str) -> None:
    from qerl.model.loader import load

    write_random_checkpoint(SHAPE, tmp_path / "bf16")
    if base != "bf16":
        quantize(tmp_path / "bf16", tmp_path / base, base)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = load(str(tmp_path / base), base=base, device="cuda")
    taken = torch.cuda.max_memory_allocated() - before
    nbytes = Checkpoint(tmp_path / base).nbytes
    assert 0.9 * nbytes < taken < nbytes + LAYER
    assert model.arch.layers == 6
