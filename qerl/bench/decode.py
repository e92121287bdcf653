"""Rollout speed by batch size: random weights of a shape, LoRA on all projections, every sample to its full length.

Prefill is the time to the first token of all; the decode phase is the rest. The floor reads weights, adapter and cached
keys and values once a step at 4.0 TB/s.
"""

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from qerl.bench.replay import BANDWIDTH
from qerl.engine.cache import block_bytes, blocks_that_fit
from qerl.engine.engine import Engine
from qerl.generate import BLOCK_SIZE
from qerl.model.adapter import add_lora
from qerl.model.decoder import Decoder
from qerl.model.layers import LoraSettings
from qerl.model.loader import load_random
from qerl.records import Request, Sampling


def measure(
    shape: str, base: str, rank: int, batches: list[int], prompt: int, new: int, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """A row for each batch size. rank 0: no LoRA."""
    if not torch.cuda.is_available():
        raise ValueError("Rollout by batch size is measured on a GPU; without --batch the CPU serves too.")
    say(f"Making random weights of {shape} as {base} ...")
    model = load_random(shape, base=base, device="cuda", dtype="bfloat16")
    if rank:
        add_lora(model, LoraSettings(r=rank, lora_alpha=2 * rank))
    lengths = [prompt + new + BLOCK_SIZE] * max(batches)
    engine = Engine(model, blocks_that_fit(model, BLOCK_SIZE, lengths), BLOCK_SIZE, max_running=max(batches))
    draw = random.Random(0)
    for batch in batches:
        say(f"batch {batch} ...")
        ids = [tuple(draw.randrange(model.arch.vocab) for _ in range(prompt)) for _ in range(batch)]
        requests = [Request(i, prompt_ids, 1) for i, prompt_ids in enumerate(ids)]
        engine.generate(requests, Sampling(max_tokens=24))  # kernels are compiled, graphs captured
        first, all_ = (_seconds(engine, requests, count) for count in (1, new))
        kept = batch * (prompt + new / 2) * block_bytes(model, BLOCK_SIZE) / BLOCK_SIZE
        least = (_weight_bytes(model) + kept) / BANDWIDTH
        yield {
            "op": "decode", "shape": shape, "base": base, "rank": rank, "batch": batch, "prompt": prompt, "new": new,
            "prefill_ms": round(1e3 * first, 1), "tokens_per_s": round(batch * (new - 1) / (all_ - first), 1),
            "step_ms": round(1e3 * (all_ - first) / (new - 1), 3), "floor_ms": round(1e3 * least, 3),
            "of_floor": round(least * (new - 1) / (all_ - first), 2),
        }  # fmt: skip


def _seconds(engine: Engine, requests: list[Request], new: int) -> float:
    torch.cuda.synchronize()
    begun = time.monotonic()
    engine.generate(requests, Sampling(max_tokens=new))
    return time.monotonic() - begun


def _weight_bytes(model: Decoder) -> int:
    """What a decode step reads of the model: all but the embedding, unless that is the head too."""
    seen = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for _, tensor in model.tensors()}
    masters = sum(parameter.nbytes for parameter in model.parameters())
    table = 0 if model.untied_head is None else model.embedding.read().nbytes
    return sum(seen.values()) - masters - table
