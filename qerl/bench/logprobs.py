"""How far the sampler's log-probs are from the trainer's: NVFP4 (or another base), LoRA and noise, fast paths on.

The engine samples (decode kernels, captured graphs, its cache); the packed forward then gives the same tokens'
log-probs with the same noise, once without gradients (fused kernels, as old policies are scored) and once with them (as
the loss is computed). Weights are random; LoRA's B and A are moved a little, so that it counts.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from qerl.bench.decode import random_model
from qerl.bench.machine import require_context, require_shapes
from qerl.bench.qlora import require
from qerl.device import resolve_device
from qerl.engine.cache import blocks_that_fit, is_fp8
from qerl.engine.engine import Engine
from qerl.generate import BLOCK_SIZE
from qerl.model.adapter import trained_parameters
from qerl.model.decoder import Decoder
from qerl.model.noise import set_noise
from qerl.model.packing import next_tokens, pack
from qerl.model.trained import refresh
from qerl.records import Completion, Request, Sampling

MOVED = 0.01  # standard deviation of what is added to LoRA
AT_A_TIME = 16  # sequences of a forward


def measure(
    shape: str,
    base: str,
    rank: int,
    sigma: float,
    batch: int,
    lengths: tuple[int, int],
    kv_cache_dtype: str,
    device: str | None,
    say: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """A row for each way of the trainer. lengths: tokens of a prompt, and new ones."""
    where, (prompt, new) = resolve_device(device), lengths
    require([base])  # refused before anything is made
    require_shapes([shape], where)
    require_context([shape], prompt, new)
    is_fp8(kv_cache_dtype)
    say(f"Making random weights of {shape} as {base}, LoRA r = {rank} ...")
    model = random_model(shape, base, rank, where)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trained_parameters(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(where) * MOVED)
    refresh(model)
    set_noise(model, sigma, generator)
    draw = random.Random(0)
    ids = [tuple(draw.randrange(model.arch.vocab) for _ in range(prompt)) for _ in range(batch)]
    blocks = blocks_that_fit(model, BLOCK_SIZE, [prompt + new + BLOCK_SIZE] * batch, kv_cache_dtype=kv_cache_dtype)
    engine = Engine(model, blocks, BLOCK_SIZE, max_running=batch, kv_cache_dtype=kv_cache_dtype)
    say(f"Sampling {batch} x {new} tokens ...")
    requests = [Request(i, prompt_ids) for i, prompt_ids in enumerate(ids)]
    done = sorted(engine.stream(requests, Sampling(max_tokens=new, noise=True)), key=lambda c: c.request)
    engine.sleep()
    sampled = torch.tensor([p for completion in done for p in completion.policy_logprobs])
    for way, gradients in (("scored, no gradients", False), ("trained, gradients", True)):
        say(f"{way} ...")
        difference = (log_probs(model, ids, done, gradients) - sampled).abs()
        yield {
            "model": shape, "base": base, "rank": rank, "sigma": sigma, "kv_cache_dtype": kv_cache_dtype,
            "batch": batch, "prompt": prompt, "new_tokens": new, "trainer": way, "tokens": len(sampled),
            "mean": float(f"{difference.mean():.3g}"), "max": float(f"{difference.max():.3g}"),
        }  # fmt: skip


def log_probs(model: Decoder, ids: list[tuple[int, ...]], done: list[Completion], gradients: bool) -> Tensor:
    """Of all completions' tokens by the packed forward with noise, one after another, on the CPU."""
    found = []
    for start in range(0, len(done), AT_A_TIME):
        some = done[start : start + AT_A_TIME]
        packed = pack([[*ids[c.request], *c.token_ids] for c in some], model.device)
        places, targets = next_tokens(packed)
        with torch.set_grad_enabled(gradients):
            hidden = model(packed, noise=True, recompute=gradients)
            logp = model.logprobs(hidden[places], targets)[0].detach().cpu()
        parts = torch.split(logp, [length - 1 for length in packed.lengths])
        found += [part[len(ids[c.request]) - 1 :] for part, c in zip(parts, some, strict=True)]
    return torch.cat(found)
