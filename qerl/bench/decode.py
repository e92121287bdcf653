"""Rollout speed: random weights of a shape, LoRA on all projections, every sample to its full length.

Prefill is the time until all have their first token; the decode phase is the rest. The floor reads weights, adapter and
cached keys and values once a step at an H200's 4.0 TB/s; a CPU has no share of it.

Short traces are run as they are. Of long ones, decode steps are timed at `CONTEXTS` contexts from the prompt's length
to the last, over a cache of zeros, and integrated (between contexts a step's time is taken as linear): 8192 tokens need
200 steps instead of 8191. Such rows leave out the scheduler's share of the host's time. The column `timed` says which:
"every step", or the number of contexts.
"""

import gc
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from qerl.bench.machine import require_context, require_shapes
from qerl.bench.qlora import BITSANDBYTES, hold_bitsandbytes, nearest, require
from qerl.bench.replay import BANDWIDTH
from qerl.device import resolve_device
from qerl.engine.cache import block_bytes, blocks_that_fit, is_fp8
from qerl.engine.drawing import Drawing
from qerl.engine.engine import Engine
from qerl.engine.scheduler import Chunk, Step
from qerl.engine.sequence import Sequence
from qerl.generate import BLOCK_SIZE
from qerl.model.adapter import add_lora
from qerl.model.decoder import Decoder
from qerl.model.layers import LoraSettings
from qerl.model.loader import load_random
from qerl.records import Request, Sampling
from qerl.rl.measure import peak_memory_gb

CONTEXTS = 5
LOOKS = 4  # at the host, at each context
WARM_UP = 24  # tokens


@dataclass(frozen=True)
class Table:
    """What to measure: every combination."""

    shapes: tuple[str, ...]
    bases: tuple[str, ...]
    ranks: tuple[int, ...]  # of LoRA; 0: none
    batches: tuple[int, ...]
    new_tokens: tuple[int, ...]
    prompt: int  # tokens
    run_up_to: int  # new tokens; longer traces are integrated
    device: str | None = None
    kv_cache_dtype: str = "auto"


def measure(table: Table, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """A row for each combination; what does not fit into memory is said and left out."""
    device = resolve_device(table.device)
    require(table.bases)  # refused before anything is measured
    require_shapes(table.shapes, device)
    if min(table.new_tokens) < 2:
        raise ValueError("--max-tokens must be at least 2: the first is the prefill's, decode steps give the others.")
    require_context(table.shapes, table.prompt, max(table.new_tokens))
    is_fp8(table.kv_cache_dtype)  # refuses a name that is not there
    for shape in table.shapes:
        for base in table.bases:
            for rank in table.ranks:
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)
                yield from _rows(table, shape, base, rank, device, say)
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()


def _rows(
    table: Table, shape: str, base: str, rank: int, device: torch.device, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    say(f"Making random weights of {shape} as {base}, LoRA r = {rank} ...")
    model = random_model(shape, base, rank, device)
    lengths = [table.prompt + max(table.new_tokens) + 2 * BLOCK_SIZE] * max(table.batches)
    blocks = blocks_that_fit(model, BLOCK_SIZE, lengths, kv_cache_dtype=table.kv_cache_dtype)
    engine = Engine(model, blocks, BLOCK_SIZE, max_running=max(table.batches), kv_cache_dtype=table.kv_cache_dtype)
    token_bytes = block_bytes(model, BLOCK_SIZE, table.kv_cache_dtype) / BLOCK_SIZE
    for batch in table.batches:
        say(f"{shape} {base} r = {rank}, batch {batch} ...")
        requests, prefill = _requests(model, batch, table.prompt), None
        for new in table.new_tokens:
            if batch * _blocks(table.prompt + new + engine.lookahead) > blocks:
                say(f"batch {batch} with {new} new tokens does not fit: the cache has room for {blocks} blocks")
                continue
            if prefill is None:
                _phases(engine, requests, WARM_UP)  # kernels are compiled, graphs captured
                say(f"decode steps are {decoded(engine)}")
            if new <= table.run_up_to:
                (prefill, step), timed = _phases(engine, requests, new), "every step"
            else:
                prefill = prefill or _phases(engine, requests, 1)[0]
                step, timed = mean_step_seconds(engine, batch, table.prompt, new), f"{CONTEXTS} contexts"
            least = (_weight_bytes(model) + batch * (table.prompt + new / 2) * token_bytes) / BANDWIDTH
            yield {
                "model": shape, "base": base, "rank": rank, "batch": batch, "prompt": table.prompt, "new_tokens": new,
                "kv_cache_dtype": table.kv_cache_dtype, "prefill_ms": round(1e3 * prefill, 1),
                "tokens_per_s": round(batch / step, 1), "step_ms": round(1e3 * step, 3),
                "floor_ms": round(1e3 * least, 3),
                "of_floor": round(least / step, 2) if device.type == "cuda" else None,
                "timed": timed, "peak_gb": round(_peak_gb(engine), 2),
            }  # fmt: skip


def random_model(shape: str, base: str, rank: int, device: torch.device) -> Decoder:
    """Layers after the first are copies of it: a 32B shape is there in seconds. base: `bitsandbytes` too."""
    require([base])
    dtype = "bfloat16" if device.type == "cuda" else None
    model = load_random(shape, base=nearest(base), device=device, dtype=dtype, repeat=True)
    if base == BITSANDBYTES:
        hold_bitsandbytes(model)
    if rank:
        add_lora(model, LoraSettings(r=rank, lora_alpha=2 * rank))
    return model


def decoded(engine: Engine) -> str:
    """How it has decoded so far."""
    return "captured graphs" if engine.graphs is not None and engine.graphs.captured else "eager"


def mean_step_seconds(engine: Engine, batch: int, prompt: int, new: int) -> float:
    """Of the decode steps from the prompt's end to the last new token: trapezoids between `CONTEXTS` contexts."""
    contexts = [prompt + round(i * (new - 1) / (CONTEXTS - 1)) for i in range(CONTEXTS)]
    times = [step_seconds(engine, batch, context) for context in contexts]
    return sum((a + b) / 2 for a, b in pairwise(times)) / (CONTEXTS - 1)


def step_seconds(engine: Engine, batch: int, context: int) -> float:
    """A decode step where all sequences have so many tokens. The cache holds what it holds: zeros take as long."""
    drawing = Drawing(Sampling(max_tokens=1), engine.model.arch.vocab, engine.model.device)
    need = _blocks(context + engine.lookahead)
    sequences = [
        Sequence(i, i, 0, (1,) * context, engine.lookahead, blocks=list(range(i * need, (i + 1) * need)))
        for i in range(batch)
    ]
    chunks = tuple(Chunk(sequence, context - 1, 1, samples=True) for sequence in sequences)
    step = Step(chunks, copies=(), decodes=True, repeats=engine.lookahead)
    begun = 0.0
    for look in range(LOOKS + 1):
        if look == 1:  # the first compiles and captures
            begun = time.monotonic()
        engine.begin(step, drawing).drawn()
    return (time.monotonic() - begun) / (LOOKS * engine.lookahead)


def _requests(model: Decoder, batch: int, prompt: int) -> list[Request]:
    draw = random.Random(batch)
    return [Request(i, tuple(draw.randrange(model.arch.vocab) for _ in range(prompt))) for i in range(batch)]


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


def _phases(engine: Engine, requests: list[Request], new: int) -> tuple[float, float]:
    """Seconds until each sequence has its first token, and of a decode step of all after that.

    A run that is broken off has no such figures: the interruption goes on to the caller.
    """
    if engine.model.device.type == "cuda":
        torch.cuda.synchronize()
    waiting, later = {request.id for request in requests}, 0
    begun = first = time.monotonic()

    def on_tokens(request: int, sample: int, tokens: list[int]) -> None:
        nonlocal first, later
        if waiting:
            waiting.discard(request)
            first = time.monotonic()
        else:
            later += len(tokens)

    for _ in engine.stream(requests, Sampling(max_tokens=new), on_tokens):
        pass
    return first - begun, (time.monotonic() - first) * len(requests) / max(1, later)


def _peak_gb(engine: Engine) -> float:
    """On a GPU what torch allocated at most, and the cache, which torch does not count."""
    held = engine.cache.memory.nbytes if engine.cache.memory is not None else 0
    return peak_memory_gb(engine.model.device) + held / 1e9


def _weight_bytes(model: Decoder) -> int:
    """What a decode step reads of the model: all but the embedding, unless that is the head too."""
    seen = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for _, tensor in model.tensors()}
    masters = sum(parameter.nbytes for parameter in model.parameters())
    table = 0 if model.untied_head is None else model.embedding.read().nbytes
    return sum(seen.values()) - masters - table
