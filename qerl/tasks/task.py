"""A task: where prompts come from, and the rewards that belong to them. Registered by name; no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from qerl.config import Config
from qerl.tasks import arithmetic
from qerl.tasks.rewards import RewardFunction

Row = dict[str, Any]  # `prompt` (a string or messages) and any other columns


@dataclass(frozen=True)
class Task:
    train: Sequence[Row]
    test: Sequence[Row]  # held out: no training sees them
    rewards: tuple[RewardFunction, ...]


def arithmetic_task(config: Config) -> Task:
    """Generated sums; the held-out ones are the same for every seed."""
    levels = config.arithmetic.levels

    def accuracy(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
        return [arithmetic.accuracy(text, right) for text, right in zip(completions, answer, strict=True)]

    test = [
        {"prompt": one.prompt, "answer": one.answer}
        for one in (arithmetic.distinct(config.eval_size, 0, levels, "test") if config.eval_size else [])
    ]
    return Task(_Generated(config.seed, levels), test, (accuracy,))


class _Generated(Sequence[Row]):
    """Training problems, made when they are asked for."""

    LENGTH = 100_000

    def __init__(self, seed: int, levels: tuple[int, ...]) -> None:
        self.seed, self.levels = seed, levels
        self[0]  # refuses bad levels now

    def __len__(self) -> int:
        return self.LENGTH

    def __getitem__(self, index: Any) -> Any:
        one = arithmetic.problem(self.seed, index, self.levels, "train")
        return {"prompt": one.prompt, "answer": one.answer}


TASKS: dict[str, Callable[[Config], Task]] = {"arithmetic": arithmetic_task}


FROM_PYTHON = "(given from Python)"  # what the settings of a run with its own data name as its task


def task_named(config: Config) -> Task:
    if config.task == FROM_PYTHON:
        raise ValueError("This run has its data from Python: go on there, with qerl.train(..., resume=True).")
    if config.task not in TASKS:
        raise ValueError(f"There is no task {config.task!r}; there are {', '.join(TASKS)}.")
    return TASKS[config.task](config)
