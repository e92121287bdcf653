"""Groups: P prompts x G samples against P G separate prompts of the same length, to the second token of every sample.

The first sample of a group computes the prompt and is still running when the others take it over: each prompt goes
through the model once.
"""

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from qerl.bench.decode import random_model
from qerl.bench.machine import require_context, require_shapes
from qerl.bench.qlora import require
from qerl.device import resolve_device
from qerl.engine.cache import blocks_that_fit
from qerl.engine.engine import Engine
from qerl.generate import BLOCK_SIZE
from qerl.records import Request, Sampling

TOKENS = 2


def measure(
    shape: str,
    base: str,
    rank: int,
    groups: tuple[int, int],
    prompt: int,
    device: str | None,
    say: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """Two rows: groups (prompts, samples of each), and as many separate prompts as there are samples in all."""
    prompts, samples = groups
    where, total = resolve_device(device), prompts * samples
    require([base])  # refused before anything is made
    require_shapes([shape], where)
    require_context([shape], prompt, TOKENS)
    say(f"Making random weights of {shape} as {base}, LoRA r = {rank} ...")
    model = random_model(shape, base, rank, where)
    blocks = blocks_that_fit(model, BLOCK_SIZE, [prompt + TOKENS + BLOCK_SIZE] * total)
    engine = Engine(model, blocks, BLOCK_SIZE, max_running=total)
    draw = random.Random(0)
    ids = [tuple(draw.randrange(model.arch.vocab) for _ in range(prompt)) for _ in range(total)]
    for count, each in ((prompts, samples), (total, 1)):
        say(f"{count} prompts x {each} ...")
        requests = [Request(i, ids[i], each) for i in range(count)]
        list(engine.stream(requests, Sampling(max_tokens=TOKENS)))  # kernels are compiled, graphs captured
        if where.type == "cuda":
            torch.cuda.synchronize()
        begun = time.monotonic()
        list(engine.stream(requests, Sampling(max_tokens=TOKENS)))  # an interruption goes on to the caller
        yield {
            "model": shape, "base": base, "rank": rank, "prompts": count, "samples": each, "prompt": prompt,
            "ms": round(1e3 * (time.monotonic() - begun), 1),
        }  # fmt: skip
