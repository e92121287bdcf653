"""`qerl generate` as a function: prompts in, rows of completions out, on our engine."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from qerl.engine.engine import Engine
from qerl.model.adapter import load_adapter
from qerl.model.decoder import Decoder
from qerl.model.loader import load
from qerl.quant.checkpoint import resolve
from qerl.records import Completion, Request, Sampling

BLOCK_SIZE = 16
CACHE_BYTES_CPU = 2 << 30
CACHE_SHARE_GPU = 0.8  # of the memory that is free once the model is loaded

Prompt = str | list[dict[str, str]]  # taken as it is, or messages for the chat template


def read_prompts(file: Path) -> list[Prompt]:
    """A JSONL file whose rows have `prompt`: a string or a list of messages."""
    prompts: list[Prompt] = []
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{file}, line {number}, is not JSON: {error}.") from error
                if not isinstance(row, dict) or not isinstance(row.get("prompt"), str | list):
                    raise ValueError(f"{file}, line {number}, has no `prompt` (a string or a list of messages).")
                prompts.append(row["prompt"])
    if not prompts:
        raise ValueError(f"{file} holds no prompts.")
    return prompts


def encode(tokenizer: Any, prompt: Prompt) -> tuple[int, ...]:
    """A string is taken as it is, with the tokenizer's special tokens; messages go through the chat template, which
    brings its own (no second BOS)."""
    if isinstance(prompt, str):
        return tuple(tokenizer(prompt)["input_ids"])
    if not tokenizer.chat_template:
        raise ValueError("The model has no chat template: give prompts as strings.")
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def stop_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """All EOS ids of the generation config, else of the model's config, and the tokenizer's."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        ids = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        found |= set(ids if isinstance(ids, list) else [] if ids is None else [ids])
        if found:
            break
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return tuple(sorted(found))


def cache_blocks(model: Decoder, sequences: Iterable[int]) -> int:
    """Blocks for sequences of these lengths, as many as memory allows."""
    arch = model.arch
    block = 2 * arch.layers * BLOCK_SIZE * arch.kv_heads * arch.head_dim * model.dtype.itemsize
    room = CACHE_BYTES_CPU
    if model.device.type == "cuda":
        room = int(CACHE_SHARE_GPU * torch.cuda.mem_get_info(model.device)[0])
    return max(1, min(sum(-(-length // BLOCK_SIZE) for length in sequences), room // block))


def generate(
    model: str,
    prompts: list[Prompt],
    samples: int,
    sampling: Callable[[tuple[int, ...]], Sampling],
    base: str,
    adapter: Path | None = None,
    dtype: str | None = None,
    device: str | None = None,
    on_tokens: Callable[[int], None] = lambda n: None,
) -> Iterator[dict[str, Any]]:
    """A row a prompt, in order: `prompt` and its `completions`. sampling is told the model's stop ids."""
    folder = resolve(model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    requests = [Request(i, encode(tokenizer, prompt), samples) for i, prompt in enumerate(prompts)]
    settings = sampling(stop_ids(folder, tokenizer))
    decoder = load(model, base, device, dtype)
    if adapter is not None:
        load_adapter(decoder, adapter)
    lengths = [len(r.prompt_ids) + settings.max_tokens for r in requests for _ in range(samples)]
    engine = Engine(decoder, cache_blocks(decoder, lengths), BLOCK_SIZE, tokenizer=tokenizer)
    waiting: dict[int, list[Completion]] = {request.id: [] for request in requests}
    for done in engine.stream(requests, settings):
        on_tokens(len(done.token_ids))
        waiting[done.request].append(done)
    for request, prompt in zip(requests, prompts, strict=True):
        ordered = sorted(waiting[request.id], key=lambda done: done.sample)
        yield {"prompt": prompt, "completions": [_row(done) for done in ordered]}


def _row(done: Completion) -> dict[str, Any]:
    return {
        "text": done.text,
        "token_ids": list(done.token_ids),
        "logprobs": list(done.logprobs),
        "finish_reason": done.finish_reason,
    }
