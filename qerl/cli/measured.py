"""Rows of a measurement to the CSV file, a table and a line of JSON. Whatever ends it, what was measured is shown."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from qerl.console import finish, say, screen
from qerl.errors import Interrupted

Row = dict[str, Any]


def measured(
    rows: Iterable[Row],
    columns: tuple[str, ...],
    title: str,
    csv: Path | None,
    turned: bool = False,
    summary: Callable[[list[Row]], dict[str, Any]] | None = None,
) -> None:
    """Each row goes to the CSV file as it comes; the table has `columns` of them, the line of JSON all. turned: many
    figures of few rows, which are said as well as they come, since each takes minutes. summary: what the whole
    measurement says besides."""
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
            screen.print(turned_table(found, columns, title) if turned else table(found, columns, title))
            finish({"rows": found} | more)
    if not found:
        raise ValueError("Nothing was measured: none of it fits into memory.")


def table(rows: list[Row], columns: tuple[str, ...], title: str) -> Table:
    """A line for each row, narrow enough for a pipe's 80 columns; a column without any value is left out."""
    shown = _shown(rows, columns)
    headings = (column.replace("_", "\n", 1).replace("_", " ") for column in shown)
    made = Table(*headings, title=title, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False)
    for row in rows:
        made.add_row(*(_cell(row[column]) for column in shown))
    return made


def turned_table(rows: list[Row], columns: tuple[str, ...], title: str) -> Table:
    """A line for each figure."""
    made = Table("", *(str(i) for i in range(1, len(rows) + 1)), title=title)
    for column in _shown(rows, columns):
        made.add_row(column, *(_cell(row[column]) for row in rows))
    return made


def _shown(rows: list[Row], columns: tuple[str, ...]) -> list[str]:
    return [column for column in columns if any(row[column] not in (None, "") for row in rows)]


def _cell(value: Any) -> str:
    return "" if value is None else str(value)
