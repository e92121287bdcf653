"""`qerl plan`: what a run will do and take, before there is a GPU, a download or a wait."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from qerl.cli.words import Words, split_words
from qerl.config import Config
from qerl.console import finish, say, screen
from qerl.recipe import load_config, training_recipe

if TYPE_CHECKING:
    from qerl.rl.plan import Plan

SLOW = 0.25  # share of the sequences that the cache holds, below which sampling is slow


def plan(
    words: Words = None,
    gpu: Annotated[
        float,
        typer.Option(
            help="Memory of the GPU in GB of 10^9 bytes. Cards are sold in GiB, 7 % more: 24 GiB are 25.8 GB, less "
            "what driver and desktop hold."
        ),
    ] = 80.0,
) -> None:
    """Steps, tokens and GPU memory of a run, from its settings alone: no GPU, no download.

    The exit status is 1 if it does not fit.
    """
    from qerl.rl.plan import make_plan

    recipe, overrides = split_words(words)
    recipe, about = training_recipe(recipe, overrides)
    say(about)
    config = load_config(recipe, overrides)
    found = make_plan(config, gpu)
    screen.print(run_table(config, found))
    screen.print(memory_table(found))
    if found.fits:
        say(f"It fits {gpu:g} GB. {cache_words(config, found)}")
    else:
        help = f"This would fit: {found.advice}." if found.advice else "No change of settings that was tried helps."
        say(f"It does not fit {gpu:g} GB. {found.too_large}. {help}")
    finish({"model": config.model, "base": config.base, "task": config.task} | found.summary())
    if not found.fits:
        raise typer.Exit(1)


def run_table(config: Config, found: "Plan") -> Table:
    def number(value: float | None) -> str:
        if value is None:
            return "unknown before the data is there"
        return f"{value:,.4g}" if value % 1 else f"{value:,.0f}"

    table = Table("run", "", title=f"{config.model} as {config.base} on {config.task}")
    table.add_row("training rows", number(found.rows))
    table.add_row("steps (epochs)", f"{number(found.steps)} ({number(found.epochs)})")
    table.add_row("updates", number(found.updates))
    table.add_row("completions a step", number(found.completions_a_step))
    sampled = f"{number(found.sampled_tokens_a_step)} a step, {number(found.sampled_tokens)}"
    table.add_row("sampled tokens at most", sampled)
    table.add_row("tokens through updates at most", number(found.updated_tokens))
    micro_batch = f"{number(found.micro_batch)} (micro_batch_tokens={config.micro_batch_tokens})"
    table.add_row("tokens of a micro-batch at most", micro_batch)
    table.add_row("weights that train", number(found.trained_weights))
    table.add_row("blocks recomputed in the backward pass", f"{found.recomputed_blocks} of {found.blocks}")
    return table


def memory_table(found: "Plan") -> Table:
    """Three groups of rows: what is always there, and what comes to it in each of the two moments that decide."""
    from qerl.engine.workspace import MARGIN
    from qerl.rl.advice import ALWAYS, SAMPLING, UPDATING
    from qerl.rl.plan import GB

    memory, gpu = found.memory, int(found.gpu_gb * GB)
    table = Table("memory", "GB", title="Estimate, by part")
    table.columns[1].justify = "right"

    def row(text: str, size: int) -> None:
        table.add_row(f"  {text}", f"{size / GB:.2f}")

    def head(text: str, size: int | None = None) -> None:
        table.add_section()
        table.add_row(f"[bold]{text}[/]", "" if size is None else f"[bold]{size / GB:.2f}[/]")

    margin = f"margin: {100 * MARGIN:g} % of torch's, for gaps and libraries"
    head("always there", memory.resident + memory.workspace)
    for name, text in ALWAYS.items():
        row(text, getattr(memory, name))
    head("while it is updated (the cache sleeps)", memory.updating)
    row(UPDATING["gradients"], memory.gradients)
    row(f"{UPDATING['kept']} of {found.micro_batch:,} tokens", memory.kept)
    # The two never meet, so the larger one counts.
    larger = "block" if memory.block > memory.logits else "logits"
    row(UPDATING[larger], getattr(memory, larger))
    row(margin, memory.update_margin)
    head("while it samples", memory.sampling(gpu))
    row(f"cache ({memory.cache_wanted / GB:.2f} for all sequences at their longest)", memory.cache(gpu))
    row(SAMPLING["prefill"], memory.prefill)
    row(margin, memory.sample_margin)
    return table


def cache_words(config: Config, found: "Plan") -> str:
    """How many sequences the cache holds, beside how many there are; and what to do where it holds few."""
    evaluated = f", in an evaluation {found.eval_sequences} questions" if found.eval_sequences else ""
    words = (
        f"The cache holds {found.whole_sequences} sequences at their longest; in a step {found.step_sequences} "
        f"completions are decoded at a time{evaluated}."
    )
    if found.whole_sequences >= SLOW * found.step_sequences:
        return words
    fp8 = (
        "kv_cache_dtype=fp8 lets it hold nearly twice as many (at a price: docs/training.md), "
        if config.kv_cache_dtype == "auto"
        else ""
    )
    return (
        f"{words} That is few: unless most are much shorter, they wait for each other and sampling will be slow; {fp8}"
        "a lower max_completion_length more."
    )
