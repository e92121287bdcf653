"""Rows whose completions are run as programs: in a sandbox, or by the user's word without."""

from collections.abc import Iterable, Sequence

from qerl.tasks.code import UNSAFE
from qerl.tasks.grader import Grader
from qerl.tasks.prompts import MadeRows
from qerl.tasks.sandbox import sandbox_available
from qerl.tasks.shipped import Reward
from qerl.tasks.source import Row


def runs_programs(rewards: Iterable[Reward]) -> bool:
    return any(isinstance(one, Grader) and one.path.startswith("qerl.tasks.code:") for one in rewards)


def program_rows(rows: Sequence[Row], unsafe: bool) -> Sequence[Row]:
    """The rows for graders that run programs; `unsafe` (no sandbox) reaches them in each row. A column that the data
    brings has no say in it."""
    if not unsafe and (why := sandbox_available()):
        raise ValueError(
            f"Rewards that run programs need a sandbox, and there is none here: {why.rstrip('.')}. "
            "docs/sandbox.md says what to do, and what code.unsafe: true would risk."
        )
    return MadeRows(lambda index: dict(rows[index]) | {UNSAFE: unsafe}, len(rows)) if len(rows) else rows
