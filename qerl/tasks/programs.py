"""Rows whose completions are run as programs: in a sandbox, or by the user's word without."""

from collections.abc import Iterable, Sequence

from qerl.tasks.grader import Grader
from qerl.tasks.prompts import MadeRows
from qerl.tasks.sandbox import sandbox_available
from qerl.tasks.shipped import Reward
from qerl.tasks.source import Row


def runs_programs(rewards: Iterable[Reward]) -> bool:
    return any(isinstance(one, Grader) and one.path.startswith("qerl.tasks.code:") for one in rewards)


def program_rows(rows: Sequence[Row], unsafe: bool) -> Sequence[Row]:
    """The rows for graders that run programs; `unsafe` (no sandbox) reaches them in each row."""
    if unsafe:
        return MadeRows(lambda index: dict(rows[index]) | {"_code_unsafe": True}, len(rows)) if len(rows) else rows
    if why := sandbox_available():
        raise ValueError(
            f"Rewards that run programs need a sandbox, and there is none here: {why} See docs/sandbox.md."
        )
    return rows
