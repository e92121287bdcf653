"""The `qerl` command: a few lines of wiring for each subcommand."""

import errno
import json
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from qerl import __version__
from qerl.bench.cli import bench
from qerl.config import default_recipe, load_config, settings
from qerl.console import byte_progress, finish, log, say, screen
from qerl.errors import Interrupted

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Reinforcement learning for large language models on 4-bit weights.",
)
app.add_typer(bench, name="bench")

Recipe = Annotated[Path | None, typer.Option("--recipe", "-r", help="YAML file with settings.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings as key=value, by their dotted keys.", show_default=False)
]


def main() -> None:
    """Runs the command; what a user can mend ends in a message, not in a traceback."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app()
    except Interrupted as error:
        _complain(error)
        sys.exit(130 if isinstance(error.__cause__, KeyboardInterrupt) else 1)
    except ValueError as error:
        _complain(error)
        sys.exit(2)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT):
            raise
        _complain(ValueError(f"{error.strerror}: {error.filename or 'the disk'}. What was complete is kept."))
        sys.exit(1)


def _complain(error: Exception) -> None:
    log.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if show:
        finish({"version": __version__})
        raise typer.Exit


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="Checkpoint folder or hub id of a 16-bit model.")],
    out: Annotated[Path, typer.Argument(help="Folder to make; it must not exist.")],
    overrides: Overrides = None,
    recipe: Recipe = None,
    format: Annotated[str | None, typer.Option(help="nvfp4, mxfp4 or nf4.", show_default="nvfp4")] = None,
    method: Annotated[str | None, typer.Option(help="rtn, mse, awq or gptq.", show_default="mse")] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="Leave these linear layers in 16 bits; may repeat.")] = None,
    double_quant: Annotated[bool, typer.Option("--double-quant", help="nf4: store absmax in 8 bits.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, or auto.", show_default="auto")] = None,
    calibration: Annotated[Path | None, typer.Option(help="Text for awq and gptq (JSONL or plain).")] = None,
) -> None:
    """Turn a 16-bit checkpoint into a 4-bit one.

    Streams: memory does not grow with the model. Interrupted, it leaves no half-made OUT, and the same command goes on
    where it stopped. `qerl config` lists all settings (quantize.*).
    """
    from qerl import quantize as tool

    words = [f"quantize.ignore={json.dumps(ignore)}"] if ignore else []
    flags = {"format": format, "method": method, "device": device, "calibration.file": calibration}
    words += [f"quantize.{key}={json.dumps(str(value))}" for key, value in flags.items() if value is not None]
    words += ["quantize.double_quant=true"] if double_quant else []
    config = load_config(recipe, [*(overrides or []), *words]).quantize
    if config.method in ("awq", "gptq"):  # llm-compressor shows progress of its own
        report = tool.quantize(model, out, config, say=say)
    else:
        with byte_progress(f"quantizing to {config.format}") as (on_plan, on_bytes):
            report = tool.quantize(model, out, config, on_plan, on_bytes, say)
    _show_report(report)
    finish(report.summary() | {"out": out})


def _show_report(report: Any) -> None:
    def percent(error: float | None) -> str:
        return "-" if error is None else f"{100 * error:.2f} %"

    table = Table(title=f"{report.format}, method {report.method}: relative error by layer kind")
    for column, justify in (("kind", "left"), ("layers", "right"), ("weights", "right"), ("error", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for kind, row in report.by_kind().items():
        table.add_row(kind, str(row["layers"]), f"{row['weights']:,}", percent(row["relative_error"]))
    screen.print(table)
    if report.worst():
        worst = Table("layer", "error", title="The worst layers")
        for module, error in report.worst():
            worst.add_row(module, percent(error))
        screen.print(worst)
    before, after = report.bytes_before, report.bytes_after
    screen.print(
        f"{decimal(before)} -> {decimal(after)} ({after / before:.0%}), {report.bits_per_weight:.2f} bits a weight, "
        f"{report.seconds:.1f} s; 16-bit linear layers: {', '.join(report.ignored) or 'none'}",
        highlight=False,
    )


@app.command()
def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="A recipe (YAML), then settings as key=value. Without a recipe: the tiny model on sums, on a CPU.",
            metavar="[RECIPE] [KEY=VALUE]...",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in output_dir.")] = False,
) -> None:
    """Train a model by reinforcement learning. `qerl config` lists all settings."""
    from qerl.rl.folder import resumed_config
    from qerl.rl.run import train as run

    recipes = [word for word in words or [] if "=" not in word]
    overrides = [word for word in words or [] if "=" in word]
    if len(recipes) > 1:
        raise ValueError(f"Give one recipe, not {len(recipes)}: {', '.join(recipes)}. Settings are written key=value.")
    config = load_config(Path(recipes[0]) if recipes else default_recipe(), overrides)
    if resume:
        config = resumed_config(config.output_dir, overrides)
    finish(run(config, resume=resume).summary())


@app.command()
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
    seed: Annotated[int, typer.Option(help="Of the random numbers.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write rows to this JSONL file instead of the screen.")] = None,
    cache_blocks: Annotated[
        int | None, typer.Option(help="Blocks of the cache.", show_default="what fits", min=1)
    ] = None,
) -> None:
    """Continue prompts, on 16-bit or 4-bit weights, with or without an adapter."""
    if (prompt is None) == (file is None):
        raise ValueError("Give either --prompt TEXT or --file prompts.jsonl.")
    if out is not None and (out.exists() or not out.parent.is_dir()):
        problem = "exists. Name a new file, or remove it" if out.exists() else "lies in no folder. Make the folder"
        raise ValueError(f"{out} {problem} first.")
    from qerl import generate as tool
    from qerl.records import Sampling

    def sampling(stop_ids: tuple[int, ...]) -> Sampling:
        return Sampling(max_tokens=max_tokens, temperature=temperature, seed=seed, stop_ids=stop_ids)

    prompts: list[tool.Prompt] = tool.read_prompts(file) if file else [prompt or ""]
    job = tool.Job(model, prompts, n, base, adapter, dtype, device, cache_blocks)
    say(f"Loading {model} ...")
    generation = tool.Generation(job, sampling)
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
    finish(counts | {"cache_blocks": generation.num_blocks, "out": out})


@app.command()
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
                _complain(error)
            print()
    finish({"turns": turns})


@app.command()
def config(overrides: Overrides = None, recipe: Recipe = None) -> None:
    """Print every setting as it resolves, with its unit and help."""
    resolved = settings(load_config(recipe, overrides or []))
    table = Table("key", "value", "unit", "help", title="Settings (changed ones are bold)")
    table.columns[0].overflow = "fold"
    for entry in resolved:
        value = escape(str(entry.value))
        table.add_row(entry.key, value if entry.value == entry.default else f"[bold]{value}[/]", entry.unit, entry.help)
    screen.print(table)
    finish({entry.key: entry.value for entry in resolved})


@app.command()
def memory(
    shapes: Annotated[
        list[str] | None,
        typer.Argument(help="Model shapes, as in `qerl random --help`.", show_default="qwen2.5-3b, 7b, 14b, 32b"),
    ] = None,
) -> None:
    """What the weights of a model take in each format, from its shape alone."""
    from qerl.model.memory import FORMATS, PAPER, weight_bytes
    from qerl.model.shapes import shape_named

    names = shapes or [f"qwen2.5-{size}" for size in ("3b", "7b", "14b", "32b")]
    table = Table("GB", *FORMATS, title="Weights in GB (10^9 bytes)")
    notes, result = Table("figure", "paper", "ours", "what the paper's figure counts"), {}
    for name in names:
        weights = {format: weight_bytes(shape_named(name), format) for format in FORMATS}
        table.add_row(name, *(f"{w.total / 1e9:.2f}" for w in weights.values()))
        result[name] = {format: w.total / 1e9 for format, w in weights.items()}
        for format, w in weights.items():
            if figure := PAPER.get((name, format)):
                notes.add_row(f"{name} {format}", f"{figure.gigabytes}", f"{figure.ours(w):.2f}", figure.counts)
    screen.print(table)
    if notes.row_count:
        screen.print(notes)
    finish(result)


@app.command()
def random(
    shape: Annotated[
        str, typer.Argument(help="tiny, qwen2.5-{0.5b,1.5b,3b,7b,14b,32b}, qwen3-{4b,8b}, llama-3.1-8b, ...")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to make; it must not exist.")],
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
) -> None:
    """Write a 16-bit checkpoint with random weights of a named shape, to try things on."""
    from qerl.model.random_checkpoint import write_random_checkpoint
    from qerl.model.shapes import shape_named

    tensors = shape_named(shape).tensors()
    with byte_progress(f"random {shape}") as (on_plan, on_bytes):
        on_plan(sum(spec.nbytes for spec in tensors.values()))
        write_random_checkpoint(shape_named(shape), out, seed, on_bytes)
    finish({"out": out, "parameters": sum(spec.numel for spec in tensors.values())})
