"""Rows of a measurement to the CSV file, a table and a line of JSON. Whatever ends it, what was measured is shown."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from qerl.console import finish, say, screen
from qerl.errors import Interrupted

Row = dict[str, Any]


def measured(
    rows: Iterable[Row],
    columns: tuple[str, ...],
    title: str,
    csv: Path | None,
    turned: int = 0,
    summary: Callable[[list[Row]], dict[str, Any]] | None = None,
) -> None:
    """Each row goes to the CSV file as it comes; the table has `columns` of them, the line of JSON all. turned: many
    figures of few rows, which are said as well as they come, since each takes minutes; so many of the first columns
    name a row. summary: what the whole measurement says besides."""
    from qerl.bench.results import append_rows, commit, require_usable

    if csv:
        require_usable(csv, columns)
    found, more, file, at = list[Row](), dict[str, Any](), csv, commit() if csv else ""
    try:
        for row in rows:
            found.append(row)
            if turned:
                say("  ".join(f"{column} {row[column]}" for column in columns if row[column] is not None))
            if csv and file != (file := append_rows(csv, [row], at)):
                say(f"{csv} has other columns than these results: they go to {file}.")
        more = summary(found) if summary is not None and found else {}
    except KeyboardInterrupt as error:
        rows_done = f"{len(found)} finished row{'' if len(found) == 1 else 's'}"
        kept = f" and kept in {file}" if file else ""
        rest = f"after {rows_done}, shown above{kept}" if found else "before the first row was finished"
        raise Interrupted(f"Interrupted {rest}.") from error
    finally:
        if found:
            made = turned_tables(found, columns, title, turned, screen) if turned else [table(found, columns, title)]
            for i, one in enumerate(made):
                screen.print(*([""] if i else []), one)
            finish({"rows": found} | more)
    if not found:
        raise ValueError("Nothing was measured: none of it fits into memory.")


def table(rows: list[Row], columns: tuple[str, ...], title: str) -> Table:
    """A line for each row, narrow enough for a pipe's 80 columns; a column without any value is left out."""
    shown = _shown(rows, columns)
    made = _empty([column.replace("_", "\n", 1).replace("_", " ") for column in shown], title)
    for row in rows:
        made.add_row(*(_cell(row[column]) for column in shown))
    return made


def turned_tables(rows: list[Row], columns: tuple[str, ...], title: str, names: int, console: Console) -> list[Table]:
    """A line for each figure and a column for each row, under its name (the first columns). As many rows make a table
    as the console is wide enough for, uncut; the first has the title."""
    tables, wide = list[Table](), console.options.update_width(1000)
    figures = _shown(rows, columns[names:])
    while rows:
        count = 0
        while count < len(rows):
            longer = _turned(rows[: count + 1], columns[:names], figures, None if tables else title)
            if count and Measurement.get(console, wide, longer).maximum > console.width:
                break
            made, count = longer, count + 1
        tables.append(made)
        rows = rows[count:]
    return tables


def _turned(rows: list[Row], names: tuple[str, ...], figures: list[str], title: str | None) -> Table:
    made = _empty(["\n".join(names), *("\n".join(_cell(row[name]) for name in names) for row in rows)], title)
    for figure in figures:
        made.add_row(figure, *(_cell(row[figure]) for row in rows))
    return made


def _empty(headings: list[str], title: str | None) -> Table:
    return Table(*headings, title=title, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False)


def _shown(rows: list[Row], columns: tuple[str, ...]) -> list[str]:
    return [column for column in columns if any(row[column] not in (None, "") for row in rows)]


def _cell(value: Any) -> str:
    return "" if value is None else str(value)
