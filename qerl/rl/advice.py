"""Where a run does not fit: what is too large, and changes of its settings that may help."""

from collections.abc import Iterator
from typing import Any

from qerl.config import Config
from qerl.rl.footprint import Footprint
from qerl.rl.sizes import longest_sequence

SHORTEST = 64  # tokens of a completion, below which shorter ones are no advice

Change = dict[str, Any]

ALWAYS = {
    "weights": "weights that forwards read",
    "masters": "float32 masters of what is trained",
    "copies": "LoRA in 16 bits",
    "optimizer": "optimizer states",
    "scratch": "a weight dequantized for a product, workspaces of cuBLAS",
    "workspace": "workspace of decode steps, kept by graphs",
    "context": "CUDA and its libraries (estimate)",
}
UPDATING = {
    "gradients": "gradients, float32",
    "kept": "activations kept for the backward pass",
    "block": "one block at work in the backward pass",
    "logits": "a chunk of logits, final hidden states",
}
SAMPLING = {"cache_each": "the cache for one sequence", "prefill": "transient results of a prefill"}


def too_large(parts: Footprint, gpu: int) -> str:
    """In words: which moment asks for more than there is, and its largest part."""
    least = parts.sampling(gpu) - parts.cache(gpu) + parts.cache_each
    sampling = least > parts.updating
    asked, own = (least, SAMPLING) if sampling else (parts.updating, UPDATING)
    moment = "Sampling, with a cache for one sequence alone," if sampling else "An update"
    words = ALWAYS | own
    largest = max(words, key=lambda name: getattr(parts, name))
    return (
        f"{moment} asks for {asked / 1e9:.2f} GB, {(asked - gpu) / 1e9:.2f} too many; the largest part is "
        f"{getattr(parts, largest) / 1e9:.2f} GB of {words[largest]}"
    )


def changes(config: Config) -> Iterator[Change]:
    """Of the settings, one after another, those that cost least first."""
    longest = longest_sequence(config)
    one_sequence = {"micro_batch_tokens": min(longest, config.micro_batch_tokens)}
    thrifty: Change = {"recompute": "auto", "optim": "adamw_8bit"} | one_sequence
    tight = thrifty | {"base": "nvfp4"} | _small_cache(config)
    shorter, fewer = _shorter(config), _fewer(config)
    tried: list[Change] = [
        {"recompute": "auto"},
        {"optim": "adamw_8bit"},
        *({"micro_batch_tokens": n} for n in (16384, 8192, 4096) if longest <= n < config.micro_batch_tokens),
        one_sequence,
        thrifty,
        {"eval_size": min(config.eval_size, config.prompts_per_step * config.num_generations)},
        _small_cache(config),
        *([{"base": "bf16"}] if config.base == "full" else []),  # LoRA instead of all weights
        {"base": "nvfp4"},
        tight,
        *fewer,
        *shorter,
        *(tight | change for change in shorter),
        *(tight | fewest | change for fewest in fewer[-1:] for change in ({}, *shorter)),
    ]
    for change in tried:
        if needed := {key: value for key, value in change.items() if getattr(config, key) != value}:
            yield needed


def _small_cache(config: Config) -> Change:
    """FP8, where something corrects for it."""
    corrected = config.ratio == "behaviour" or config.correction.form != "off"
    return {"kv_cache_dtype": "fp8"} if config.kv_cache_dtype == "auto" and corrected else {}


def _fewer(config: Config) -> list[Change]:
    """Sequences at a time, in a step and in its evaluations: half as many, a quarter, ..."""
    found, prompts = [], config.prompts_per_step // 2
    while prompts >= 1 and prompts % config.steps_per_generation == 0:
        size = min(config.eval_size, prompts * config.num_generations)
        found.append({"prompts_per_step": prompts, "eval_size": size})
        prompts = prompts // 2
    return found


def _shorter(config: Config) -> list[Change]:
    found, length = [], config.max_completion_length // 2
    while length >= SHORTEST:
        tokens = min(config.micro_batch_tokens, config.max_prompt_length + length)
        found.append({"max_completion_length": length, "micro_batch_tokens": tokens})
        length = length // 2
    return found
