"""`qerl train` and `qerl config`."""

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from qerl.cli.words import Overrides, Recipe, Words, look_here, split_words
from qerl.console import finish, say, screen
from qerl.recipe import load_config, settings, training_recipe


def train(
    words: Words = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in output_dir.")] = False,
) -> None:
    """Train a model by reinforcement learning. `qerl config` lists all settings."""
    from qerl.rl.folder import resumed_config
    from qerl.rl.ranks import launched
    from qerl.rl.run import train as run

    look_here()
    recipe, overrides = split_words(words)
    recipe, about = training_recipe(recipe, overrides)
    config = load_config(recipe, overrides)
    if resume:
        config = resumed_config(config.output_dir, overrides)
    elif launched().first:
        say(about)
    result = run(config, resume=resume)
    if launched().first:
        finish(result.summary())


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
