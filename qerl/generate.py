"""`qerl generate` as a function: prompts in, rows of completions out, on our engine."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from jinja2.exceptions import TemplateError

from qerl.engine.cache import blocks_that_fit, is_fp8
from qerl.engine.engine import MAX_RUNNING, Engine
from qerl.model.decoder import Decoder
from qerl.model.loader import architecture_in, load, require_base
from qerl.quant.checkpoint import TOKENIZER_FILES, read_config, resolve
from qerl.records import Completion, Request, Sampling
from qerl.tasks.source import numbered_rows

BLOCK_SIZE = 16

Prompt = str | list[dict[str, str]]  # taken as it is, or messages for the chat template


def read_prompts(file: Path) -> list[Prompt]:
    """A JSONL file whose rows have `prompt`: a string or a list of messages."""
    if not file.is_file():
        raise ValueError(f"There is no file {file}.")
    prompts: list[Prompt] = []
    for number, row in numbered_rows(file):
        prompt = row.get("prompt")
        if not isinstance(prompt, str | list):
            raise ValueError(f"{file}, line {number}, has no `prompt` (a string or a list of messages).")
        if isinstance(prompt, list) and not _are_messages(prompt):
            raise ValueError(
                f'{file}, line {number}: messages are a list such as [{{"role": "user", "content": "..."}}].'
            )
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{file} holds no prompts.")
    return prompts


def _are_messages(messages: list[Any]) -> bool:
    return bool(messages) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    )


def encode(tokenizer: Any, prompt: Prompt) -> tuple[int, ...]:
    """A string is taken as it is, with the tokenizer's special tokens; messages go through the chat template, which
    brings its own (no second BOS)."""
    if isinstance(prompt, str):
        return tuple(tokenizer(prompt)["input_ids"])
    if not isinstance(prompt, list):
        raise ValueError(f"A prompt is a string or a list of messages, not {prompt!r:.80}.")
    if not tokenizer.chat_template:
        raise ValueError("The model has no chat template: give prompts as strings.")
    try:
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise ValueError(f"The model's chat template refuses the messages {prompt!r:.200}: {error}.") from error
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer; a folder without one is refused by name."""
    read_config(folder)  # its own message where this is no model
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(f"{folder} has no tokenizer ({' or '.join(TOKENIZER_FILES)}): add one to make text of tokens.")
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError) as error:
        raise ValueError(f"transformers can't read the tokenizer in {folder}: {error}") from error


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


def engine_for(
    model: Decoder,
    tokenizer: Any,
    prompts: Iterable[int],
    max_tokens: int,
    num_blocks: int | None = None,
    kv_cache_dtype: str = "auto",
    penalty: bool = False,
) -> Engine:
    """An engine whose cache holds prompts of these lengths with their completions as far as memory allows; of many, the
    longest that run at a time. num_blocks: so many blocks instead. penalty: repetition will be penalized."""
    lengths = sorted((min(length + max_tokens, model.arch.max_positions) for length in prompts), reverse=True)
    together = lengths[:MAX_RUNNING]
    blocks = num_blocks or blocks_that_fit(model, BLOCK_SIZE, together, 0, kv_cache_dtype, penalty)
    return Engine(model, blocks, BLOCK_SIZE, tokenizer=tokenizer, kv_cache_dtype=kv_cache_dtype)


@dataclass(frozen=True)
class Job:
    """What `generate` is asked for."""

    model: str
    prompts: list[Prompt]
    samples: int
    base: str
    adapter: Path | None = None
    dtype: str | None = None
    device: str | None = None
    num_blocks: int | None = None  # of the cache; by default what the job needs and memory allows
    kv_cache_dtype: str = "auto"  # or fp8

    def __post_init__(self) -> None:
        require_base(self.base)  # before anything is fetched or loaded
        is_fp8(self.kv_cache_dtype)


class Generation:
    """A model loaded for a job; `rows` does the work."""

    def __init__(self, job: Job, sampling: Callable[[tuple[int, ...]], Sampling]) -> None:
        """sampling is told the model's stop ids."""
        folder = resolve(job.model, architecture_in)
        self.job = job
        self.tokenizer = load_tokenizer(folder)
        self.requests = [Request(i, encode(self.tokenizer, p), job.samples) for i, p in enumerate(job.prompts)]
        self.sampling = sampling(stop_ids(folder, self.tokenizer))
        model = load(job.model, job.base, job.device, job.dtype, adapter=job.adapter)
        lengths = [len(request.prompt_ids) for request in self.requests for _ in range(job.samples)]
        most = self.sampling.max_tokens
        self.engine = engine_for(model, self.tokenizer, lengths, most, job.num_blocks, job.kv_cache_dtype)

    def rows(self, on_tokens: Callable[[int], None], on_done: Callable[[], None]) -> Iterator[dict[str, Any]]:
        """A row a prompt, in order, as soon as it and those before it are complete: `prompt`, `completions`, and
        `error` for a prompt that was refused."""
        self.done: dict[int, list[Completion]] = {request.id: [] for request in self.requests}
        next_row = 0
        stream = self.engine.stream(self.requests, self.sampling, lambda request, sample, new: on_tokens(len(new)))
        with closing(stream):
            for completion in stream:
                self.done[completion.request].append(completion)
                on_done()
                while next_row < len(self.done) and len(self.done[next_row]) == self.job.samples:
                    yield self._row(next_row)
                    next_row += 1

    def rest(self, taken: int) -> Iterator[dict[str, Any]]:
        """After a Ctrl-C: the rows beyond the first `taken`, with what is complete; `missing` counts what is not."""
        return (self._row(i) for i in range(taken, len(self.requests)))

    def _row(self, i: int) -> dict[str, Any]:
        ordered = sorted(self.done[i], key=lambda completion: completion.sample)
        completions = [_columns(completion) for completion in ordered if not completion.error]
        row: dict[str, Any] = {"prompt": self.job.prompts[i], "completions": completions}
        if ordered and ordered[0].error:
            row["error"] = ordered[0].error
        if missing := self.job.samples - len(ordered):
            row["missing"] = missing
        return row


def _columns(done: Completion) -> dict[str, Any]:
    return {
        "text": done.text,
        "token_ids": list(done.token_ids),
        "logprobs": list(done.logprobs),
        "finish_reason": done.finish_reason,
    }
