"""`qerl sweep`."""

from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from qerl.cli.compare import show
from qerl.cli.words import split_words
from qerl.console import finish, log, say, screen
from qerl.recipe import default_recipe


def sweep(
    words: Annotated[
        list[str],
        typer.Argument(
            help="A recipe (YAML; without one the default job), then settings: key=a,b,c is tried with each value, "
            "seeds=3 with three seeds. A list is one value in brackets.",
            metavar="[RECIPE] KEY=A,B,C... [seeds=N] [output_dir=FOLDER]",
            show_default=False,
        ),
    ],
) -> None:
    """Train a grid of settings and seeds, one run after another, and compare them.

    The same command again goes on: finished runs are skipped, begun ones resume, failed ones are tried again.
    """
    from qerl.compare.summary import compare
    from qerl.sweep.grid import Point, make_grid
    from qerl.sweep.sweep import DONE, run_sweep

    recipe, settings = split_words(words)
    if recipe is None and any(word.startswith(("model=", "task=")) for word in settings):
        raise ValueError("Without a recipe a sweep is of the default job. For another model or task name a recipe.")
    grid = make_grid(recipe or default_recipe(), settings)
    runs = len(grid.points)
    say(f"{runs} runs in {grid.folder}, over {', '.join(grid.varied) or 'seeds alone'}:")
    for point in grid.points:
        say(f"  {point.name}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[now]}"))
    with Progress(*columns, TimeElapsedColumn(), console=log) as bar:
        task = bar.add_task("runs", total=runs, now="")

        def on_step(number: int, point: Point, line: dict[str, Any] | None) -> None:
            if line is None:
                bar.update(task, completed=number + 1)
            else:
                asked = f"/{point.config.max_steps}" if point.config.max_steps > 0 else ""
                bar.update(task, now=escape(f"{point.name}: step {line['step']}{asked}"))

        outcomes = run_sweep(grid, on_step)
    done = [p for p, outcome in zip(grid.points, outcomes, strict=True) if outcome.status == DONE]
    failed = {p.name: o.reason for p, o in zip(grid.points, outcomes, strict=True) if o.status != DONE}
    if failed:
        table = Table("run", "what went wrong", title=f"{len(failed)} of {runs} runs failed")
        for name, reason in failed.items():
            table.add_row(escape(name), escape(reason))
        screen.print(table)
        say("The same command tries them again.")
    result: dict[str, Any] = {"runs": runs, "done": len(done), "failed": failed, "folder": str(grid.folder)}
    if done:
        comparison = compare([grid.folder / point.name for point in done], grid.folder / "comparison")
        show(comparison)
        result |= comparison.summary()
    finish(result)
    if failed:
        raise typer.Exit(1)
