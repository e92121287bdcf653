"""What all commands share: where they write, how they end, a bar for bytes.

Tables go to stdout, and the last line there is the result as one line of JSON; progress and messages go to stderr.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

screen = Console()
log = Console(stderr=True)


def finish(result: dict[str, Any]) -> None:
    """The last line of every command."""
    print(json.dumps(result, default=str), flush=True)


def say(message: str) -> None:
    log.print(escape(message), highlight=False, soft_wrap=True)


def complain(error: Exception) -> None:
    """What a user can mend, without a traceback."""
    log.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)


@contextmanager
def byte_progress(what: str) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """A bar with GB/s and time left; yields (set the total, add bytes)."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=log)
    task = bar.add_task(what, total=None, start=False)

    def begin(total: int) -> None:  # a refusal before this shows no bar
        bar.start()
        bar.start_task(task)
        bar.update(task, total=total)

    try:
        yield begin, lambda n: bar.advance(task, n)
    finally:
        bar.stop()
