"""`qerl bench ...`: a few lines of wiring for each measurement."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from qerl.console import finish, say, screen

bench = typer.Typer(no_args_is_help=True, help="Measure: a table, then one line of JSON.")

Csv = Annotated[Path | None, typer.Option(help="Append the rows to this CSV file, with GPU and commit.")]


@bench.command("quantize")
def bench_quantize(
    shape: Annotated[str, typer.Option(help="Shape of the random model.")] = "qwen2.5-0.5b",
    folder: Annotated[
        Path | None, typer.Option(help="Where to put the models.", show_default="the temporary folder")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Runs of each; the best counts.", min=1)] = 2,
    csv: Csv = None,
) -> None:
    """qerl's rtn against llm-compressor's data-free NVFP4A16: seconds and peak memory."""
    from qerl.bench.quantize import compare
    from qerl.bench.results import append_rows

    rows = compare(shape, folder, repeats, say)
    if csv:
        append_rows(csv, rows)
    columns = ("contender", "cores", "seconds", "gb_per_s", "peak_gb", "output_gb")
    table = Table(*columns, title=f"{shape} to NVFP4 on the CPU, folder to folder")
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    screen.print(table)
    ours, theirs = rows
    finish(
        {
            "shape": shape,
            "rows": rows,
            "speedup": round(theirs["seconds"] / ours["seconds"], 2),
            "memory_ratio": round(ours["peak_gb"] / theirs["peak_gb"], 3),
        }
    )


@bench.command("rollout")
def bench_rollout(
    shape: Annotated[str, typer.Option(help="Shape of the random model.")] = "tiny",
    prompts: Annotated[int, typer.Option(help="How many prompts.", min=1)] = 32,
    samples: Annotated[int, typer.Option(help="Samples of each.", min=1)] = 8,
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.", min=1)] = 256,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    batch: Annotated[
        str | None, typer.Option(help="Batch sizes, as 1,8,32: speed of prefill and decoding with LoRA, on a GPU.")
    ] = None,
    base: Annotated[str, typer.Option(help="With --batch: nvfp4, bf16, mxfp4 or nf4.")] = "nvfp4",
    rank: Annotated[int, typer.Option(help="With --batch: LoRA's rank; 0: none.", min=0)] = 32,
    prompt: Annotated[int, typer.Option(help="With --batch: tokens of a prompt.", min=1)] = 256,
    csv: Csv = None,
) -> None:
    """Our engine against transformers.generate: tokens a second on samples of mixed lengths.

    With --batch, the engine alone by batch size: all samples as long as --max-tokens.
    """
    from qerl.bench.results import append_rows
    from qerl.bench.rollout import compare

    if batch is not None:
        from qerl.bench.decode import measure

        title = f"{shape} as {base}, LoRA r = {rank}, prompts of {prompt}, {max_tokens} new tokens"
        shown = ("batch", "prefill_ms", "step_ms", "floor_ms", "of_floor", "tokens_per_s")
        _measured(measure(shape, base, rank, _numbers(batch), prompt, max_tokens, say), shown, title, csv)
        return
    rows = compare(shape, prompts, samples, max_tokens, device, say)
    if csv:
        append_rows(csv, rows)
    columns = ("contender", "tokens", "seconds", "tokens_per_s")
    table = Table(
        *columns, title=f"{shape}, {prompts} prompts x {samples} samples, up to {max_tokens} tokens, {device}"
    )
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    screen.print(table)
    finish({"rows": rows, "speedup": round(rows[0]["tokens_per_s"] / rows[-1]["tokens_per_s"], 2)})


@bench.command("linear")
def bench_linear(
    shape: Annotated[str, typer.Option(help="Whose linear layers.")] = "qwen2.5-7b",
    rows: Annotated[str, typer.Option(help="Rows of x, that is, sequences in a decode step.")] = "1,8,16,32,64,128,256",
    rank: Annotated[int, typer.Option(help="LoRA's rank.", min=1)] = 32,
    format: Annotated[str, typer.Option(help="nvfp4, or nf4 (beside bitsandbytes where that is installed).")] = "nvfp4",
    csv: Csv = None,
) -> None:
    """4-bit linears on our kernels, alone and with LoRA, against cuBLAS in bf16: microseconds, on a GPU."""
    from qerl.bench.linear import measure

    columns = ("layer", "rows", "us", "with_lora_us", "bf16_us", "x_bf16", "bitsandbytes_us", "of_floor", "tb_per_s")
    title = f"{shape}: linear layers as {format}, LoRA r = {rank}"
    _measured(measure(shape, _numbers(rows), rank, say, format), columns, title, csv)


def _numbers(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdigit() and int(word) > 0 for word in words):
        raise ValueError(f"{text!r} is no list of numbers; write them as 1,8,32.")
    return [int(word) for word in words]


def _measured(rows: Iterable[dict[str, Any]], columns: tuple[str, ...], title: str, csv: Path | None) -> None:
    """Rows as a table, each also to the CSV file as it comes."""
    from qerl.bench.results import append_rows

    table, found = Table(*columns, title=title), []
    for row in rows:
        found.append(row)
        table.add_row(*(str(row[column]) for column in columns))
        if csv:
            append_rows(csv, [row])
    screen.print(table)
    finish({"rows": found})


@bench.command("parity")
def bench_parity(
    model: Annotated[str, typer.Option(help="Checkpoint folder or hub id, with a chat template.")],
    data_dir: Annotated[Path | None, typer.Option(help="Folder with gsm8k_test.jsonl.")] = None,
    limit: Annotated[int, typer.Option(help="Only the first questions.", min=1)] = 100,
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.", min=1)] = 256,
    batch_size: Annotated[int, typer.Option(help="Of lm-eval's hf model.", min=1)] = 1,
    csv: Csv = None,
) -> None:
    """`qerl eval` against lm-eval on GSM8K: greedy, float32, on the CPU, the same prompts and limits."""
    from qerl.bench.parity import compare
    from qerl.bench.results import append_rows

    rows = compare(model, data_dir, limit, max_tokens, batch_size, say)
    if csv:
        append_rows(csv, [{"model": Path(model).name, "max_tokens": max_tokens, **row} for row in rows])
    columns = (name.replace("_", " ") for name in rows[0])
    table = Table(*columns, title=f"GSM8K, first {limit} questions, {max_tokens} tokens; differences are from hf")
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    screen.print(table)
    finish({"rows": rows})


@bench.command("formats")
def bench_formats() -> None:
    """Mean squared error of each format, rtn against mse, on three kinds of weights."""
    from qerl.bench.formats import measure

    rows = measure()
    table = Table("weights", "format", "bits", "rtn", "mse", "less", title="Mean squared error / variance")
    for row in rows:
        table.add_row(row.weights, row.format, f"{row.bits}", f"{row.rtn:.5f}", f"{row.mse:.5f}", f"{row.gain:.1%}")
    screen.print(table)
    finish({f"{row.weights}/{row.format}": {"rtn": row.rtn, "mse": row.mse} for row in rows})
