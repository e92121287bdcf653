"""`qerl generate` and `qerl chat`."""

import json
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn

from qerl.console import complain, finish, log, say, screen
from qerl.errors import Interrupted


def generate(
    model: Annotated[str, typer.Option(help="Checkpoint folder or hub id.")],
    prompt: Annotated[str | None, typer.Option(help="One prompt, taken as it is.")] = None,
    file: Annotated[Path | None, typer.Option(help="JSONL with `prompt` a row: a string, or messages.")] = None,
    adapter: Annotated[Path | None, typer.Option(help="PEFT adapter folder.")] = None,
    base: Annotated[str, typer.Option(help="bf16, nvfp4, mxfp4 or nf4.")] = "nvfp4",
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32.", show_default="by device")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="a GPU if there is one")] = None,
    n: Annotated[int, typer.Option(help="Samples a prompt.", min=1)] = 1,
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0)] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus; 1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 is off.", min=0)] = 0,
    min_p: Annotated[float, typer.Option(help="Of the most likely token's probability; 0 is off.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the random numbers.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write rows to this JSONL file instead of the screen.")] = None,
    cache_blocks: Annotated[
        int | None, typer.Option(help="Blocks of the cache.", show_default="what fits", min=1)
    ] = None,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="Keys and values: auto (as computed), or fp8: half the memory, rounded.")
    ] = "auto",
) -> None:
    """Continue prompts, on 16-bit or 4-bit weights, with or without an adapter."""
    if (prompt is None) == (file is None):
        raise ValueError("Give either --prompt TEXT or --file prompts.jsonl.")
    if out is not None and (out.exists() or not out.parent.is_dir()):
        problem = "exists. Name a new file, or remove it" if out.exists() else "lies in no folder. Make the folder"
        raise ValueError(f"{out} {problem} first.")
    from qerl import generate as tool
    from qerl.records import Sampling, require_temperature

    require_temperature(temperature, top_p, top_k, min_p)
    asked = Sampling(max_tokens, temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)

    prompts: list[tool.Prompt] = tool.read_prompts(file) if file else [prompt or ""]
    job = tool.Job(model, prompts, n, base, adapter, dtype, device, cache_blocks, kv_cache_dtype)
    say(f"Loading {model} ...")
    generation = tool.Generation(job, lambda stop_ids: replace(asked, stop_ids=stop_ids))
    started, tokens, errors = time.monotonic(), [0], []
    bar = Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rate]}"), console=log)
    task = bar.add_task("generating", total=len(prompts) * n, rate="")

    def on_tokens(count: int) -> None:
        tokens[0] += count
        bar.update(task, rate=f"{tokens[0] / (time.monotonic() - started):.0f} tokens/s")

    def show(row: dict[str, Any]) -> None:
        errors.extend([row["error"]] if "error" in row else [])
        if file_out is not None:
            file_out.write(json.dumps(row) + "\n")
            file_out.flush()
        else:
            for i, completion in enumerate(row["completions"], 1):
                screen.rule(escape(f"{row['prompt']!r:.60} {i}/{n}"))
                screen.print(escape(completion["text"]), highlight=False)

    shown = 0
    with bar, nullcontext() if out is None else open(out, "x", encoding="utf-8") as file_out:
        try:
            for row in generation.rows(on_tokens, lambda: bar.advance(task)):
                show(row)
                shown += 1
        except KeyboardInterrupt as error:
            for row in generation.rest(shown):
                show(row)
            complete = sum(map(len, generation.done.values()))
            raise Interrupted(
                f"Interrupted: {complete} of {n * len(prompts)} completions are complete; they were kept."
            ) from error
    if errors and len(errors) == len(prompts):
        if out is not None:
            out.unlink()  # nothing in it
        raise ValueError(errors[0])
    for reason in sorted(set(errors)):
        say(f"{errors.count(reason)} of {len(prompts)} prompts were refused: {reason}")
    seconds = round(time.monotonic() - started, 3)
    counts = {"prompts": len(prompts), "refused": len(errors), "tokens": tokens[0], "seconds": seconds}
    finish(counts | {"cache_blocks": generation.engine.cache.num_blocks, "out": out})


def chat(
    model: Annotated[str, typer.Option(help="Checkpoint folder or hub id.")],
    adapter: Annotated[Path | None, typer.Option(help="PEFT adapter folder.")] = None,
    base: Annotated[str, typer.Option(help="bf16, nvfp4, mxfp4 or nf4.")] = "nvfp4",
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32.", show_default="by device")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="a GPU if there is one")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(help="New tokens an answer at most.", min=1)] = 512,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0)] = 0.7,
    seed: Annotated[int, typer.Option(help="Of the random numbers.")] = 0,
) -> None:
    """Talk to a model. /new starts over, /quit or Ctrl-D ends; Ctrl-C cuts an answer short."""
    from qerl.chat import Chat
    from qerl.records import Sampling

    say(f"Loading {model} ... (/new starts over, /quit or Ctrl-D ends, Ctrl-C cuts an answer short)")
    settings = Sampling(max_tokens=max_tokens, temperature=temperature, seed=seed)
    talk = Chat(model, base, adapter, dtype, device, system, sampling=settings)
    turns = 0
    while True:
        try:
            line = log.input("[bold]you>[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            break
        if line == "/quit":
            break
        if line == "/new":
            talk.restart()
        elif line.startswith("/"):
            say("Commands are /new and /quit.")
        elif line:
            try:
                talk.say(line, lambda text: print(text, end="", flush=True))
                turns += 1
            except KeyboardInterrupt:
                pass
            except ValueError as error:
                complain(error)
            print()
    finish({"turns": turns})
