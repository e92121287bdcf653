"""How the shipped tiny model was made: `python -m qerl.tiny.make OUT`.

A small Qwen2 learns sums from scratch, from text that answers in two ways: mostly at once, which it gets wrong where
carries matter, and now and then by working digit by digit, which it mostly gets right. Training stops before the direct
way is learned, so greedy decoding answers at once and is often wrong, while a sample at temperature 1 works in a share
of the cases: that working pays is left for RL to find. Only problems of the train split are ever seen.

The same seed and number of threads give the same weights on the same machine.
"""

import argparse
import json
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from qerl.quant.partial import partial_folder, require_new, writable
from qerl.tasks import arithmetic
from qerl.tasks.arithmetic import Problem

SPECIAL = ("<pad>", "<eos>")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
LETTERS = " 0123456789+-*/=().,:?abcxyz"  # more than sums need: room for other tasks
VOCABULARY = 48
IGNORED = -100  # transformers' label of a place without a target

JUDGED = (2, 3, 4)  # levels
EVALUATED = 100  # held-out problems a level
MAX_TOKENS = 48


@dataclass(frozen=True)
class Recipe:
    """What the shipped model was trained with."""

    steps: int = 2000  # the length of the cosine; training ends where the direct way is good enough
    batch: int = 48
    pieces: int = 2  # of a batch, by length, so that little is padded
    lr: float = 1.5e-3
    warmup: int = 50
    weight_decay: float = 0.01
    worked_share: float = 0.3
    levels: tuple[int, ...] = (1, 2, 2, 3, 3, 4, 4)
    direct_accuracy: float = 0.42  # on problems of levels 2 to 4, equally: reached, training stops early
    check_every: int = 25
    checked: int = 384


def make(out: Path, seed: int, recipe: Recipe, on_step: Callable[[float], None]) -> dict[str, Any]:
    """Train, write the folder, and say how many held-out problems of each level each way gets right."""
    require_new(out)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed)
    started = time.monotonic()
    steps = train(model, tokenizer, seed, recipe, on_step)
    seconds = time.monotonic() - started
    model = model.to(torch.bfloat16)
    partial = partial_folder(out)
    with writable(partial):
        shutil.rmtree(partial, ignore_errors=True)
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        os.replace(partial, out)
    model = model.float().eval()
    return {
        "out": str(out),
        "seed": seed,
        "steps": steps,
        "threads": torch.get_num_threads(),
        "seconds": round(seconds, 1),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "greedy": {level: greedy_accuracy(model, tokenizer, level, "") for level in JUDGED},
        "worked": {level: greedy_accuracy(model, tokenizer, level, "<think>") for level in JUDGED},
    }


def build_tokenizer() -> Any:
    """A token a letter, and one for each tag; what has no token is dropped.

    It is a Qwen2 tokenizer, bytes and no merges, since AutoTokenizer takes that class for any model of the family.
    """
    letters = LETTERS.replace(" ", "\u0120")  # how byte-level vocabularies write a space
    tokenizer = transformers.Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate((*SPECIAL, *TAGS, *letters))},
        merges=[],
        unk_token=None,
        pad_token="<pad>",
        eos_token="<eos>",
    )
    tokenizer.add_tokens([transformers.AddedToken(tag, normalized=False) for tag in TAGS])
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return tokenizer


def build_model(tokenizer: Any, seed: int) -> Any:
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        initializer_range=0.05,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    return transformers.Qwen2ForCausalLM(config).float()


def train(model: Any, tokenizer: Any, seed: int, recipe: Recipe, on_step: Callable[[float], None]) -> int:
    """Returns the number of steps. Whether to stop is asked of other problems of the train split, never of held-out
    ones."""
    probe = [arithmetic.problem(seed + 1, i, JUDGED, "train") for i in range(recipe.checked)]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=recipe.weight_decay, fused=True
    )

    def share_of_lr(step: int) -> float:
        return min((step + 1) / recipe.warmup, (1 + math.cos(math.pi * step / recipe.steps)) / 2)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_lr)
    model.train()
    for step in range(recipe.steps):
        if (
            step
            and step % recipe.check_every == 0
            and direct_accuracy(model, tokenizer, probe) > recipe.direct_accuracy
        ):
            return step
        first = step * recipe.batch
        examples = [example(tokenizer, seed, first + i, recipe) for i in range(recipe.batch)]
        targets = sum(len(completion) for _, completion in examples)
        total = 0.0
        for inputs, labels in batches(examples, recipe.pieces, tokenizer.pad_token_id):
            logits = model(input_ids=inputs).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
            )
            torch.autograd.backward(loss / targets)
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        on_step(total / targets)
    return recipe.steps


def example(tokenizer: Any, seed: int, index: int, recipe: Recipe) -> tuple[list[int], list[int]]:
    """Ids of a prompt and of a completion in one of the two ways."""
    one = arithmetic.problem(seed, index, recipe.levels, "train")
    works = random.Random(f"{seed} {index} way").random() < recipe.worked_share
    text = arithmetic.worked(one) if works else arithmetic.direct(one)
    return ids(tokenizer, one.prompt), [*ids(tokenizer, text), tokenizer.eos_token_id]


def ids(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text)["input_ids"]
    return found


def batches(examples: Sequence[tuple[list[int], list[int]]], pieces: int, pad: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and labels [B, T], padded on the right; examples of like length together."""
    ordered = sorted(examples, key=lambda pair: len(pair[0]) + len(pair[1]))
    size = -(-len(ordered) // pieces)
    for start in range(0, len(ordered), size):
        rows = ordered[start : start + size]
        width = max(len(prompt) + len(completion) for prompt, completion in rows)
        inputs = torch.full((len(rows), width), pad, dtype=torch.int64)
        labels = torch.full((len(rows), width), IGNORED, dtype=torch.int64)
        for i, (prompt, completion) in enumerate(rows):
            end = len(prompt) + len(completion)
            inputs[i, :end] = torch.tensor(prompt + completion, dtype=torch.int64)
            labels[i, len(prompt) : end] = inputs[i, len(prompt) : end]
        yield inputs, labels


@torch.no_grad()
def direct_accuracy(model: Any, tokenizer: Any, problems: Sequence[Problem]) -> float:
    """Share of problems that greedy decoding gets right once the answer's tag is opened: one forward, since a token is
    reached only if all before it were right."""
    opened = [ids(tokenizer, one.prompt + "<answer>") for one in problems]
    rest = [ids(tokenizer, f"{one.answer}</answer>") for one in problems]
    (inputs, labels), *_ = batches(list(zip(opened, rest, strict=True)), 1, tokenizer.pad_token_id)
    guesses = model(input_ids=inputs).logits[:, :-1].argmax(-1)
    right = (guesses == labels[:, 1:]) | (labels[:, 1:] == IGNORED)
    return float(right.all(1).double().mean())


@torch.no_grad()
def greedy_accuracy(model: Any, tokenizer: Any, level: int, begun: str) -> float:
    """Share of a level's held-out problems that are right when the completion begins so."""
    problems = arithmetic.distinct(EVALUATED, 0, (level,), "test")
    inputs = torch.tensor([ids(tokenizer, one.prompt + begun) for one in problems], dtype=torch.int64)
    outputs = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=MAX_TOKENS, do_sample=False)
    texts = tokenizer.batch_decode(outputs, skip_special_tokens=True)
    return sum(arithmetic.accuracy(text, one.answer) for text, one in zip(texts, problems, strict=True)) / EVALUATED


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m qerl.tiny.make", description="Train and write the tiny model.")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write; it must not exist")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=Recipe.steps, help="optimizer steps (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps must be at least 1.")
    recipe = Recipe(steps=arguments.steps)
    columns = TextColumn("loss {task.fields[loss]:.3f}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=recipe.steps, loss=math.nan)
        try:
            result = make(
                arguments.out, arguments.seed, recipe, lambda loss: progress.update(task, advance=1, loss=loss)
            )
        except ValueError as error:
            parser.error(str(error))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
