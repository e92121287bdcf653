"""From a local NVFP4 checkpoint to the first token, in a process of its own: twice, so that the second run finds the
compiled kernels cached. Run as a module, this file is one run.

The checkpoint was written just before and is still in the page cache: the disk is not measured.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from qerl.bench.machine import require_shapes
from qerl.device import resolve_device
from qerl.model.random_checkpoint import write_random_checkpoint
from qerl.model.shapes import shape_named

RUNS = 2
PROMPT = tuple(range(100, 132))
MORE = 9  # tokens until decode steps are compiled and captured too


def measure(
    shape: str, folder: Path | None, device: str | None, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """A row for each run, in seconds since the process was started."""
    if folder is not None and not folder.is_dir():
        raise ValueError(f"There is no folder {folder}.")
    require_shapes([shape], resolve_device(device))
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        checkpoint = Path(scratch) / "model"
        say(f"Writing a random {shape} model as nvfp4 ...")
        write_random_checkpoint(shape_named(shape), checkpoint, base="nvfp4")
        for run in range(1, RUNS + 1):
            say(f"run {run} of {RUNS} ...")
            command = [sys.executable, "-m", "qerl.bench.startup", str(checkpoint), device or "", str(time.time())]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise ValueError(f"The run failed:\n{done.stderr[-2000:]}")
            yield {"model": shape, "base": "nvfp4", "run": run} | json.loads(done.stdout.splitlines()[-1])


def moments(folder: str, device: str | None, started: float) -> dict[str, float]:
    """Loads and samples; when each stage was done, in seconds since `started` (of time.time)."""
    from qerl.engine.cache import blocks_that_fit
    from qerl.engine.engine import Engine
    from qerl.generate import BLOCK_SIZE
    from qerl.model.loader import load
    from qerl.records import Request, Sampling

    found: dict[str, float] = {}

    def done(name: str) -> None:
        found[name] = round(time.time() - started, 2)

    done("imported_s")
    model = load(folder, "nvfp4", device)
    done("loaded_s")
    engine = Engine(model, blocks_that_fit(model, BLOCK_SIZE, [1024] * 64), BLOCK_SIZE)
    done("engine_s")
    engine.generate([Request(0, PROMPT)], Sampling(max_tokens=1))
    done("first_token_s")
    engine.generate([Request(1, PROMPT)], Sampling(max_tokens=MORE))
    done("decoding_s")
    return found


if __name__ == "__main__":
    print(json.dumps(moments(sys.argv[1], sys.argv[2] or None, float(sys.argv[3]))))
