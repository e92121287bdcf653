"""`qerl quantize --method rtn` against llm-compressor's data-free NVFP4A16, folder to folder on the CPU.

Each contender runs in a process of its own, on a model with random weights of a named shape; the clock starts when its
imports are done, and memory is the process's largest resident size. Run as a module, this file is one contender.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from qerl.model.random_checkpoint import write_random_checkpoint
from qerl.model.shapes import shape_named

CORES = 2
CONTENDERS = ("qerl", "llm-compressor")


def compare(shape: str, folder: Path | None, repeats: int, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Best of `repeats` runs of each contender, in turns: seconds and peak bytes. Its row comes after its last run."""
    form = shape_named(shape)
    if importlib.util.find_spec("llmcompressor") is None:
        raise ValueError("The rival is not installed: pip install 'qerl[calibrate]'.")
    if folder is not None and not folder.is_dir():
        raise ValueError(f"There is no folder {folder}.")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        source = Path(scratch) / "source"
        say(f"Writing a random {shape} model ...")
        write_random_checkpoint(form, source)
        size = (source / "model.safetensors").stat().st_size
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
        for turn in range(repeats):
            for name in CONTENDERS:
                say(f"{name}, run {turn + 1} of {repeats} ...")
                runs[name].append(_run(name, source, Path(scratch) / f"{name}-{turn}"))
                say(f"{name}: {runs[name][-1]['seconds']:.3f} s")
                if turn + 1 == repeats:
                    yield _row(shape, name, min(runs[name], key=lambda run: run["seconds"]), size)


def ratios(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the two rows."""
    ours, theirs = rows
    return {
        "shape": ours["shape"],
        "speedup": round(theirs["seconds"] / ours["seconds"], 2),
        "memory_ratio": round(ours["peak_gb"] / theirs["peak_gb"], 3),
    }


def _row(shape: str, name: str, run: dict[str, Any], size: int) -> dict[str, Any]:
    return {
        "op": "quantize",
        "shape": shape,
        "contender": name,
        "cores": run["cores"],
        "seconds": round(run["seconds"], 3),
        "gb_per_s": round(size / 1e9 / run["seconds"], 3),
        "peak_gb": round(run["peak_bytes"] / 1e9, 3),
        "output_gb": round(run["output_bytes"] / 1e9, 3),
    }


def _run(name: str, source: Path, out: Path) -> dict[str, Any]:
    # Without a GPU, and on two cores (the child's own doing): both contenders would otherwise find more.
    command = [sys.executable, "-m", "qerl.bench.quantize", name, str(source), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    if done.returncode:
        raise ValueError(f"{name} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _qerl(source: Path, out: Path) -> Callable[[], None]:
    import transformers

    from qerl.config import QuantizeConfig
    from qerl.quantize import quantize

    _ = transformers.AutoModelForCausalLM  # its import is lazy; the rival's is done as well when the clock starts
    settings = QuantizeConfig(format="nvfp4", method="rtn", device="cpu")
    return lambda: (quantize(str(source), out, settings), None)[1]


def _llm_compressor(source: Path, out: Path) -> Callable[[], None]:
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM

    def job() -> None:
        model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
        oneshot(model=model, recipe=QuantizationModifier(targets="Linear", scheme="NVFP4A16", ignore=["lm_head"]))
        model.save_pretrained(out, save_compressed=True)

    return job


def peak_resident_bytes() -> int:
    """This process's largest resident size (getrusage's would include the parent's at the fork)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main() -> None:
    name, source, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    os.sched_setaffinity(0, cores)
    job = (_qerl if name == "qerl" else _llm_compressor)(source, out)
    started = time.monotonic()
    job()
    seconds = time.monotonic() - started
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    print(
        json.dumps({"cores": len(cores), "seconds": seconds, "peak_bytes": peak_resident_bytes(), "output_bytes": size})
    )


if __name__ == "__main__":
    main()
