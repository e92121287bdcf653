"""A task: where prompts come from, and the rewards that belong to them. By name, hub id or file; no torch.

`load_task` takes, in this order: a generated task (arithmetic, countdown, `reasoning_gym:NAME`), a registered data set
by its name or hub id (`qerl.tasks.catalog`), a local JSONL or Parquet file of rows with `prompt`, or any other hub id
whose rows have `prompt`. The last two bring no rewards.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl.config import Config
from qerl.tasks import arithmetic, countdown, reasoning
from qerl.tasks.catalog import DATA_SETS, THINK, DataSet
from qerl.tasks.prompts import MadeRows, messages, own_rows, shaped_rows
from qerl.tasks.shaping import soft_overlong
from qerl.tasks.shipped import COUNTDOWN, REASONING, Reward
from qerl.tasks.source import SUFFIXES, HubSplit, Row, load_rows, local_file, read_rows

GENERATED_LENGTH = 100_000  # training rows of a generated task
SPLITS = ("train", "test")
OTHER_FILES = (".json", ".csv", ".tsv", ".txt")  # refused as files, not looked for on the hub
FROM_PYTHON = "(given from Python)"  # what the settings of a run with its own data name as its task
COUNTDOWN_PROMPT = (
    "Use the numbers {numbers} to make {target}. Each number must be used exactly once; you may add, subtract, "
    "multiply, divide, and set brackets. Answer with the expression alone, such as <answer>(1 + 2) * 3</answer>."
)


@dataclass(frozen=True)
class Task:
    train: Sequence[Row]  # each with `prompt` (a string or messages) and any other columns; empty: for evaluation only
    test: Sequence[Row]  # held out: no training sees them
    rewards: tuple[Reward, ...]


def task_named(config: Config) -> Task:
    if config.task == FROM_PYTHON:
        raise ValueError("This run has its data from Python: go on there, with qerl.train(..., resume=True).")
    return load_task(
        config.task,
        data_dir=config.data_dir,
        system_prompt=config.system_prompt,
        seed=config.seed,
        eval_size=config.eval_size,
        max_completion_length=config.max_completion_length,
        levels=config.arithmetic.levels,
        splits=SPLITS if config.eval_size else ("train",),
    )


def load_task(
    name: str,
    *,
    data_dir: Path | None = None,
    system_prompt: str | None = None,
    seed: int = 0,
    eval_size: int = 256,
    max_completion_length: int = 1024,
    levels: Sequence[int] = arithmetic.DEFAULT_LEVELS,
    splits: Sequence[str] = SPLITS,
) -> Task:
    """system_prompt: instead of the task's own; an empty one is none. eval_size: how many held-out rows a generated
    task makes. splits: only these are read, the others are empty."""
    if name == "arithmetic":
        if system_prompt:
            raise ValueError("The task arithmetic has plain prompts without messages: drop system_prompt.")
        return arithmetic_task(seed, eval_size, tuple(levels))
    if name == "countdown":
        return countdown_task(seed, eval_size, THINK if system_prompt is None else system_prompt)
    if name.startswith(reasoning.PREFIX):
        system = THINK if system_prompt is None else system_prompt
        return reasoning_task(name.removeprefix(reasoning.PREFIX), seed, eval_size, system)
    if (data := registered(name)) is not None:
        return data_set_task(data, data_dir, system_prompt, max_completion_length, splits)
    if name.endswith((*SUFFIXES, *OTHER_FILES)) or Path(name).is_file():
        return Task(own_rows(read_rows(Path(name)), name, system_prompt), (), ())
    if name.count("/") == 1:
        return _hub_task(name, data_dir, system_prompt, splits)
    near = difflib.get_close_matches(name, [*task_names()], 1)
    raise ValueError(
        f"There is no task {name!r}.{f' Did you mean {near[0]}?' if near else ''} Name one of "
        f"{', '.join(task_names())}; a file (.jsonl, .parquet); or a hub id (owner/name)."
    )


def registered(name: str) -> DataSet | None:
    """A registered data set by its name or hub id."""
    return DATA_SETS.get(name) or next((one for one in DATA_SETS.values() if name in _hub_ids(one)), None)


def task_names() -> list[str]:
    return ["arithmetic", "countdown", f"{reasoning.PREFIX}NAME", *DATA_SETS]


def data_set_task(
    data: DataSet,
    data_dir: Path | None = None,
    system_prompt: str | None = None,
    max_completion_length: int = 1024,
    splits: Sequence[str] = SPLITS,
) -> Task:
    """A registered data set's rows as prompts. Of its rewards one may need the completion's greatest length."""
    system = data.system_prompt if system_prompt is None else system_prompt
    found = {
        name: shaped_rows(data, name, source, data_dir, system)
        for name, source in (("train", data.train), ("test", data.test))
        if source is not None and name in splits
    }
    rewards: tuple[Reward, ...] = data.rewards
    if data.overlong:
        rewards = (*rewards, soft_overlong(max_completion_length))
    return Task(found.get("train", ()), found.get("test", ()), rewards)


def arithmetic_task(seed: int, eval_size: int, levels: tuple[int, ...]) -> Task:
    """Generated sums; the held-out ones are the same for every seed."""

    def accuracy(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
        return [arithmetic.accuracy(text, right) for text, right in zip(completions, answer, strict=True)]

    def row(index: int) -> Row:
        one = arithmetic.problem(seed, index, levels, "train")
        return {"prompt": one.prompt, "answer": one.answer}

    held_out = arithmetic.distinct(eval_size, 0, levels, "test") if eval_size else []
    test = [{"prompt": one.prompt, "answer": one.answer} for one in held_out]
    return Task(MadeRows(row, GENERATED_LENGTH), test, (accuracy,))


def countdown_task(seed: int, eval_size: int, system: str) -> Task:
    def prompt(one: Row) -> Row:
        text = COUNTDOWN_PROMPT.format(numbers=", ".join(map(str, one["numbers"])), target=one["target"])
        return one | {"prompt": messages(system, text)}

    test = [prompt(countdown.problem(0, index, "test")) for index in range(eval_size)]
    train = MadeRows(lambda index: prompt(countdown.problem(seed, index, "train")), GENERATED_LENGTH)
    return Task(train, test, (COUNTDOWN,))


def reasoning_task(name: str, seed: int, eval_size: int, system: str) -> Task:
    def prompt(one: Row) -> Row:
        return one | {"prompt": messages(system, one["question"])}

    made = reasoning.Generated(name, seed)
    test = [prompt(one) for one in reasoning.test_rows(name, eval_size)] if eval_size else []
    return Task(MadeRows(lambda index: prompt(made[index]), len(made)), test, (REASONING,))


def _hub_task(name: str, data_dir: Path | None, system_prompt: str | None, splits: Sequence[str]) -> Task:
    """Any data set whose rows have `prompt`; its test split is held out where `data_dir` has it."""
    train: Sequence[Row] = ()
    test: Sequence[Row] = ()
    if "train" in splits:
        rows, where = load_rows(HubSplit(name, "train"), data_dir)
        train = own_rows(rows, where, system_prompt)
    held_out = HubSplit(name, "test")
    if "test" in splits and local_file(held_out, data_dir) is not None:
        rows, where = load_rows(held_out, data_dir)
        test = own_rows(rows, where, system_prompt)
    return Task(train, test, ())


def _hub_ids(data: DataSet) -> set[str]:
    """The hub ids that stand for a data set: that of its training data, else of its test data."""
    source = data.train or data.test
    return {source.hub_id} if source else set()
