"""`qerl memory` and `qerl random`: models by the name of their shape."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from qerl.console import byte_progress, finish, screen


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


def random(
    shape: Annotated[
        str, typer.Argument(help="toy, qwen2.5-{0.5b,1.5b,3b,7b,14b,32b}, qwen3-{4b,8b}, llama-3.1-8b, ...")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to make; it must not exist.")],
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    base: Annotated[str, typer.Option(help="bf16, or nvfp4: uniform codes, numbers that repeat.")] = "bf16",
) -> None:
    """Write a checkpoint with random weights of a named shape, to try things on."""
    from qerl.model.random_checkpoint import contents, write_random_checkpoint
    from qerl.model.shapes import shape_named
    from qerl.quant.partial import require_new

    require_new(out)
    chosen = shape_named(shape)
    with byte_progress(f"random {shape}") as (on_plan, on_bytes):
        on_plan(sum(spec.nbytes for spec in contents(chosen, base)[0].values()))
        write_random_checkpoint(chosen, out, seed, on_bytes, base)
    finish({"out": out, "parameters": sum(spec.numel for spec in chosen.tensors().values())})
