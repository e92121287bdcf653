"""`qerl compare`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from qerl.console import finish, say, screen

if TYPE_CHECKING:
    from qerl.compare.summary import Comparison, Spread


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or folders that hold runs (a sweep's).")],
    out: Annotated[Path, typer.Option(help="Folder for the pictures and comparison.json.")] = Path("comparison"),
) -> None:
    """Runs over each other: pictures against steps and seconds, and a table with seeds averaged.

    Runs whose settings differ only in the seed are one curve with a band from the least to the largest.
    """
    from qerl.compare.summary import compare as read_and_draw

    comparison = read_and_draw(runs, out)
    show(comparison)
    finish(comparison.summary())


def show(comparison: "Comparison") -> None:
    """Two tables, so that they fit a narrow screen. Columns that no run has are left out."""
    from qerl.compare.summary import COLUMNS

    learnt = ["held-out accuracy", "accuracy", "held-out reward", "reward"]  # what matters most stands first
    rest = [name for name in (*COLUMNS, "seconds") if name not in learnt]
    screen.print(_table(comparison, "What was learnt, at the end: mean ± std over seeds", learnt, counts=True))
    screen.print(_table(comparison, "Rollouts", rest, counts=False))
    for note in comparison.notes:
        say(note)
    say(f"Pictures and numbers are in {comparison.pictures[0].parent}.")


def _table(comparison: "Comparison", title: str, columns: list[str], counts: bool) -> Table:
    names = [name for name in columns if any(v[name] is not None for v in comparison.values.values())]
    table = Table(title=title)
    table.add_column("runs", overflow="fold", min_width=16)
    for name in (*(("seeds", "steps") if counts else ()), *names):
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    for group in comparison.groups:
        steps = sorted({run.steps for run in group.runs})
        many = [str(len(group.runs)), str(steps[0]) if len(steps) == 1 else f"{steps[0]}..{steps[-1]}"]
        cells = [_cell(comparison.values[group.label][name]) for name in names]
        table.add_row(escape(group.label), *(many if counts else ()), *cells)
    return table


def _cell(spread: "Spread | None") -> str:
    if spread is None:
        return "-"
    return _number(spread.mean, 3) + ("" if spread.std is None else f"\n±{_number(spread.std, 2)}")


def _number(value: float, digits: int) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.{digits}g}"
