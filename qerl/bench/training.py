"""The training pass alone: forward and backward over packed random tokens, by base and number of tokens."""

import gc
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qerl.bench.clock import Clock, peak_gb, reset_peak
from qerl.bench.decode import random_model
from qerl.bench.machine import require_shapes
from qerl.bench.operations import PEAK, pass_operations
from qerl.bench.qlora import BITSANDBYTES, fewest_recomputed, nearest, ratios, require, rivals_first
from qerl.device import resolve_device
from qerl.kernels.logprob import chunk_tokens
from qerl.model.adapter import trained_parameters
from qerl.model.decoder import Decoder
from qerl.model.layers import LoraSettings
from qerl.model.packing import Packed, next_tokens, pack
from qerl.model.shapes import Shape, shape_named
from qerl.rl.footprint import Workload, footprint
from qerl.rl.plan import within_reach

WARM = 1  # passes before those that count: kernels are compiled
Say = Callable[[str], None]


@dataclass(frozen=True)
class Passes:
    """What is measured."""

    shapes: list[str]
    bases: list[str]
    tokens: list[int]
    segment: int  # tokens of a sequence
    rank: int
    recompute: str  # auto, all, none or a number
    repeats: int
    device: str = "auto"
    profile: bool = False


def measure(job: Passes, say: Say) -> Iterator[dict[str, Any]]:
    """A row for each shape, base and number of tokens; rivals come first, so that the others have their ratios."""
    device = resolve_device(None if job.device == "auto" else job.device)
    if job.profile and device.type != "cuda":
        raise ValueError("--profile shows a GPU's kernels: leave it out on a CPU.")
    if min(job.tokens) < 2:
        raise ValueError("--tokens must be at least 2: a single token has no next one to predict.")
    require(job.bases)  # refused before anything is made
    require_shapes(job.shapes, device)
    require_recompute(job.recompute, job.shapes)
    for name in job.shapes:
        done: dict[tuple[str, int], float] = {}
        for base in rivals_first(job.bases):
            say(f"Making random weights of {name} as {base} ...")
            try:
                model = random_model(name, base, job.rank, device)
            except torch.OutOfMemoryError:
                say(f"{name} as {base} does not fit this GPU.")
                continue
            for tokens in job.tokens:
                row = _row(job, name, base, model, tokens, done, say)
                if row is not None:
                    yield row
            del model
            reset_peak(device)


def work(base: str, rank: int, tokens: int, recompute: int, item: int) -> Workload:
    """The pass as the plan knows it: no optimizer, no cache."""
    return Workload(nearest(base), LoraSettings(r=max(1, rank)), 0, tokens, recompute, 1, 1, item)


def recomputed(asked: str, base: str, shape: Shape, load: Workload, device: torch.device) -> int:
    """How many blocks; on a CPU `auto` is none."""
    if asked == "auto":
        return fewest_recomputed(base, shape, load, within_reach(device)) if device.type == "cuda" else 0
    named = {"all": shape.layers, "none": 0}
    return named[asked] if asked in named else int(asked)


def require_recompute(asked: str, shapes: list[str]) -> None:
    if asked in ("auto", "all", "none"):
        return
    if not asked.isdigit():
        raise ValueError(f"--recompute {asked!r}: write auto, all, none or a number of blocks.")
    least, name = min((shape_named(name).layers, name) for name in shapes)
    if int(asked) > least:
        raise ValueError(f"--recompute {asked}: {name} has {least} blocks. Write all, or a number up to {least}.")


def _row(
    job: Passes, name: str, base: str, model: Decoder, tokens: int, timed: dict[tuple[str, int], float], say: Say
) -> dict[str, Any] | None:
    shape, device, item = shape_named(name), model.device, model.dtype.itemsize
    blocks = recomputed(job.recompute, base, shape, work(base, job.rank, tokens, 0, item), device)
    lengths = [job.segment] * (tokens // job.segment) + ([tokens % job.segment] if tokens % job.segment else [])
    draw = random.Random(0)
    packed = pack([[draw.randrange(shape.vocab) for _ in range(length)] for length in lengths], device)
    reset_peak(device)
    try:
        times = [_one(model, packed, blocks) for _ in range(WARM + job.repeats)][WARM:]
        peak = peak_gb(device)
        if job.profile:
            _profile(model, packed, blocks, say)
    except torch.OutOfMemoryError:
        _forget(model)
        say(f"{name} as {base}: {tokens} tokens with {blocks} recomputed blocks do not fit this GPU.")
        return None
    parts = {key: statistics.median(time[key] for time in times) for key in times[0]}
    seconds = sum(parts.values())
    predicted = tokens - len(lengths)
    done = pass_operations(shape, job.rank, lengths, predicted, blocks)
    planned = footprint(shape, work(base, job.rank, tokens, blocks, item)).update_peak / 1e9
    ours = base != BITSANDBYTES  # whose memory nothing plans
    row = {
        "op": "train", "shape": name, "base": base, "rank": job.rank, "tokens": tokens, "segment": job.segment,
        "recomputed": blocks, "tokens_per_s": round(tokens / seconds, 1), "tflops": round(done / seconds / 1e12, 1),
        "of_peak": round(done / seconds / PEAK, 3) if device.type == "cuda" else None,
        **ratios(timed, base, tokens, seconds),
        **{f"{key}_ms": round(1e3 * value, 2) for key, value in parts.items()},
        "head_products_ms": round(1e3 * _head_products(model, predicted), 2),
        "peak_gb": peak, "plan_gb": round(planned, 3) if ours else None,
        "plan_off": round(planned / peak - 1, 3) if peak and ours else None,
    }  # fmt: skip
    _forget(model)
    return row


def _one(model: Decoder, packed: Packed, blocks: int) -> dict[str, float]:
    """Seconds of the layers' forward, the log-probs (whose gradient is formed at once), and the layers' backward.
    Gradients add up, as over micro-batches."""
    clock = Clock(model.device)
    places, targets = next_tokens(packed)
    with clock.part("forward"):
        hidden = model(packed, recompute=blocks)
    with clock.part("logprob"):
        chosen = hidden.detach()[places].requires_grad_()
        logp, _ = model.logprobs(chosen, targets)
        (gradient,) = torch.autograd.grad(logp.sum(), chosen)
        whole = torch.zeros_like(hidden).index_copy_(0, places, gradient)
        del chosen, logp, gradient
    with clock.part("backward"):
        hidden.backward(whole)
    return dict(clock.seconds)


def _forget(model: Decoder) -> None:
    for parameter in trained_parameters(model).values():
        parameter.grad = None
    gc.collect()


@torch.no_grad()
def _head_products(model: Decoder, tokens: int) -> float:
    """Seconds of the two bare products with the head that log-probs and their gradient ask for."""
    head, chunk = model.head.read(), min(tokens, chunk_tokens(model.arch.vocab))
    hidden: Tensor = torch.ones(chunk, model.arch.hidden, dtype=model.dtype, device=model.device)
    clock = Clock(model.device)
    for name in ("warm", "timed"):
        with clock.part(name):
            for _ in range(max(1, tokens // chunk)):
                (hidden @ head.t()) @ head
    return clock.seconds["timed"] * tokens / (chunk * max(1, tokens // chunk))


def _profile(model: Decoder, packed: Packed, blocks: int, say: Say) -> None:
    """Where the GPU's time goes, by kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        _one(model, packed, blocks)
    say(found.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=70))
