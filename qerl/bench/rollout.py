"""Our engine against `transformers.generate` (batched, with its cache) on the same random weights and prompts.

Samples end at random: one token in a hundred is a stop id, so that lengths are mixed as in a rollout. Tokens that count
are those up to a sample's end.
"""

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qerl.bench.machine import require_context, require_shapes
from qerl.device import resolve_device
from qerl.engine.cache import blocks_that_fit
from qerl.engine.engine import Engine
from qerl.generate import BLOCK_SIZE
from qerl.model.loader import load
from qerl.model.random_checkpoint import write_random_checkpoint
from qerl.model.shapes import shape_named
from qerl.records import Request, Sampling

STOP_SHARE = 0.01
SEED = 0
ON_A_GPU, ON_A_CPU = (32, 256), (8, 128)  # prompts and new tokens where nobody says; on a CPU done within a minute


@dataclass(frozen=True)
class Work:
    """What both contenders are given."""

    ids: list[tuple[int, ...]]  # prompts
    samples: int  # of each
    max_tokens: int
    stop: tuple[int, ...]  # token ids that end a sample


def compare(
    shape: str, prompts: int, samples: int, max_tokens: int, device: str, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """A row for each contender: tokens, seconds, tokens a second."""
    where = resolve_device(device)
    require_shapes([shape], where)
    form = shape_named(shape)
    random.seed(SEED)
    ids = [tuple(random.randrange(form.vocab) for _ in range(random.randrange(20, 120))) for _ in range(prompts)]
    require_context([shape], max(map(len, ids)), max_tokens)
    stop = tuple(range(int(form.vocab * STOP_SHARE)))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        say(f"Writing a random {shape} model ...")
        write_random_checkpoint(form, folder)
        contenders = {"qerl": _qerl, "qerl, eager": _qerl_eager, "transformers": _transformers}
        if where.type == "cpu":  # where there are no graphs
            del contenders["qerl, eager"]
        for name, contender in contenders.items():
            say(f"{name} ...")
            tokens, seconds = contender(folder, Work(ids, samples, max_tokens, stop), where)
            yield {
                "op": "rollout",
                "shape": shape,
                "contender": name,
                "prompts": prompts,
                "samples": samples,
                "tokens": tokens,
                "seconds": round(seconds, 3),
                "tokens_per_s": round(tokens / seconds, 1),
            }


def speedup(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Of our engine over transformers."""
    return {"speedup": round(rows[0]["tokens_per_s"] / rows[-1]["tokens_per_s"], 2)}


def _qerl_eager(folder: Path, work: Work, device: torch.device) -> tuple[int, float]:
    return _qerl(folder, work, device, graphs=False)


def _qerl(folder: Path, work: Work, device: torch.device, graphs: bool | None = None) -> tuple[int, float]:
    ids, samples, max_tokens, stop = work.ids, work.samples, work.max_tokens, work.stop
    model = load(str(folder), base="bf16", device=device)
    lengths = [len(prompt) + max_tokens for prompt in ids for _ in range(samples)]
    engine = Engine(model, blocks_that_fit(model, BLOCK_SIZE, lengths), BLOCK_SIZE, graphs=graphs)
    requests = [Request(i, prompt, samples) for i, prompt in enumerate(ids)]
    if device.type == "cuda":  # first uses: a rollout of the same shapes, so that graphs are captured
        list(engine.stream(requests, Sampling(max_tokens=max_tokens, stop_ids=stop, rollout=1, seed=SEED)))
    else:
        list(engine.stream(requests[:1], Sampling(max_tokens=2)))
    started = time.monotonic()
    done = list(engine.stream(requests, Sampling(max_tokens=max_tokens, stop_ids=stop, rollout=1, seed=SEED)))
    return sum(len(completion.token_ids) for completion in done), time.monotonic() - started


def _transformers(folder: Path, work: Work, device: torch.device) -> tuple[int, float]:
    ids, samples, max_tokens, stop = work.ids, work.samples, work.max_tokens, work.stop
    import transformers

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    longest = max(map(len, ids))
    rows = [prompt for prompt in ids for _ in range(samples)]
    padded = torch.tensor([(0,) * (longest - len(p)) + p for p in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in rows], device=device)
    torch.manual_seed(SEED)
    options = {"do_sample": True, "top_k": 0, "pad_token_id": 0, "eos_token_id": list(stop)}
    model.generate(padded[:1], attention_mask=mask[:1], max_new_tokens=2, **options)  # first uses
    started = time.monotonic()
    out = model.generate(padded, attention_mask=mask, max_new_tokens=max_tokens, **options)[:, longest:]
    seconds = time.monotonic() - started
    ends = (out < len(stop)).int()
    lengths = torch.where(ends.any(-1), ends.argmax(-1) + 1, out.shape[1])
    return int(lengths.sum()), seconds
