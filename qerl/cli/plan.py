"""`qerl plan`: what a run will do and take, before there is a GPU, a download or a wait."""

from typing import Annotated

import typer
from rich.table import Table

from qerl.cli.words import Words, split_words
from qerl.console import finish, say, screen
from qerl.recipe import load_config, training_recipe

PARTS = {
    "weights": "weights that forwards read",
    "masters": "float32 masters of what is trained",
    "copies": "LoRA in 16 bits",
    "optimizer": "optimizer states",
    "gradients": "gradients, float32",
    "scratch": "a weight dequantized for a product, workspaces of cuBLAS",
    "kept": "activations kept for the backward pass",
    "block": "one block at work; or, if larger:",
    "logits": "a chunk of logits, final hidden states",
    "context": "CUDA and its libraries (estimate)",
}

SLOW = 0.25  # share of the sequences that the cache holds, below which sampling is slow


def plan(
    words: Words = None,
    gpu: Annotated[float, typer.Option(help="Memory of the GPU, in GB (10^9 bytes).")] = 80.0,
) -> None:
    """Steps, tokens and GPU memory of a run, from its settings alone: no GPU, no download.

    The exit status is 1 if it does not fit.
    """
    from qerl.model.shapes import shape_of
    from qerl.rl.plan import GB, make_plan

    recipe, overrides = split_words(words)
    recipe, about = training_recipe(recipe, overrides)
    say(about)
    config = load_config(recipe, overrides)
    found = make_plan(config, gpu)
    memory, room = found.memory, int(gpu * GB)

    def number(value: float | None) -> str:
        return (
            "unknown before the data is there" if value is None else f"{value:,.4g}" if value % 1 else f"{value:,.0f}"
        )

    run = Table("run", "", title=f"{config.model} as {config.base} on {config.task}")
    run.add_row("training rows", number(found.rows))
    run.add_row("steps (epochs)", f"{number(found.steps)} ({number(found.epochs)})")
    run.add_row("updates", number(found.updates))
    run.add_row("completions a step", number(found.completions_a_step))
    run.add_row(
        "sampled tokens at most", f"{number(found.sampled_tokens_a_step)} a step, {number(found.sampled_tokens)}"
    )
    run.add_row("tokens through updates at most", number(found.updated_tokens))
    run.add_row("weights that train", number(found.trained_weights))
    layers = shape_of(config.model).layers
    run.add_row("blocks recomputed in the backward pass", f"{found.recomputed_blocks} of {layers}")
    screen.print(run)
    table = Table("memory", "GB", title="Estimate, by part")
    for name, text in PARTS.items():
        table.add_row(text, f"{getattr(memory, name) / GB:.2f}")
    table.add_row("workspace of sampling, kept by graphs", f"{memory.workspace_for(room) / GB:.2f}")
    table.add_row("[bold]while it is updated (the cache sleeps)[/]", f"[bold]{memory.updating(room) / GB:.2f}[/]")
    table.add_row(f"cache ({memory.cache_wanted / GB:.2f} for all sequences)", f"{memory.cache(room) / GB:.2f}")
    table.add_row("transient results of a prefill", f"{memory.prefill / GB:.2f}")
    table.add_row("[bold]while it samples[/]", f"[bold]{memory.sampling(room) / GB:.2f}[/]")
    screen.print(table)
    if found.fits:
        say(
            f"It fits {gpu:g} GB; the cache holds {found.whole_sequences} sequences at their longest, of "
            f"{found.sequences} that are decoded at a time (completions of a step or questions of an evaluation)."
        )
        if found.whole_sequences < SLOW * found.sequences:
            say("That is few: unless most are much shorter, they wait for each other and sampling will be slow.")
    else:
        say(
            f"It does not fit {gpu:g} GB. "
            + (f"This would: {found.advice}." if found.advice else "Nothing simple helps.")
        )
    finish({"model": config.model, "base": config.base, "task": config.task} | found.summary())
    if not found.fits:
        raise typer.Exit(1)
