"""Reward functions by TRL's contract, called on a batch of completions.

A function is called with the keywords `prompts`, `completions`, `completion_ids`, `trainer_state`, `log_extra`,
`log_metric` and every dataset column, each a list of one entry a completion; it takes `**kwargs` or only the names it
wants, and returns a list of numbers, None where it does not apply. It may be `async def`: such functions are awaited
together.

A `Grader` is the other kind of reward: it scores one completion at a time in worker processes, and starts on one while
others are still being sampled (`begin`).
"""

import asyncio
import importlib
import inspect
import math
import re
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from qerl.tasks.grader import Grader
from qerl.tasks.worker import raised
from qerl.tasks.workers import Graded, Workers

RewardFunction = Callable[..., Any]

GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")  # beside data columns
WHERE_MODULES_ARE = (
    "Modules are found in the folder that the command runs in and wherever Python finds them (PYTHONPATH)."
)


@dataclass(frozen=True)
class TrainerState:
    """What a reward function may know of the run; names as in transformers' TrainerState."""

    global_step: int  # steps done
    max_steps: int
    epoch: float = 0.0


class Rewards:
    """Reward functions and graders with their weights. workers: where graders run. timeout: of a call of functions."""

    def __init__(
        self,
        functions: Sequence[RewardFunction | Grader],
        weights: Sequence[float] | None = None,
        workers: Workers | None = None,
        timeout: float | None = None,
    ) -> None:
        if not functions:
            raise ValueError("There is no reward function: give reward_funcs, or a task that brings its own.")
        self.functions = list(functions)
        self.names = [reward_name(function) for function in functions]
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"Two reward functions have the same name: {', '.join(self.names)}.")
        self.weights = [1.0] * len(functions) if weights is None else [float(weight) for weight in weights]
        if len(self.weights) != len(self.functions):
            raise ValueError(f"{len(self.weights)} reward_weights for {len(self.functions)} reward functions.")
        self.workers, self.timeout = workers, timeout
        self._begun: dict[tuple[Hashable, int], Future[Graded]] = {}

    def begin(self, key: Hashable, row: dict[str, Any], text: str) -> None:
        """Start grading a completion; `score` will ask for it by the same key."""
        for i, function in enumerate(self.functions):
            if isinstance(function, Grader):
                assert self.workers is not None, "graders need workers"
                self._begun[key, i] = self.workers.submit(function, text, row)

    def accuracy_index(self, metric: str | None = None) -> int | None:
        """Which function is the named one, or the accuracy reward; None: there is no accuracy reward."""
        if metric is not None:
            if metric not in self.names:
                raise ValueError(f"There is no reward function {metric!r}; there are {', '.join(self.names)}.")
            return self.names.index(metric)
        return next((i for i, name in enumerate(self.names) if "accuracy" in name), None)

    def require_columns(self, rows: Sequence[dict[str, Any]]) -> None:
        """Refuse functions that ask for a column which no row has. Rows that are made or read one by one, when they
        are asked for, are not looked at: there it shows with the first completions."""
        columns = getattr(rows, "column_names", None)  # of a datasets.Dataset
        if isinstance(rows, list):
            columns = dict.fromkeys(key for row in rows for key in row)
        if columns is not None:
            names = dict.fromkeys([*GIVEN, *(column for column in columns if column != "prompt")])
            for function in self.functions:
                if not isinstance(function, Grader):
                    _wanted(function, names)

    def score(
        self,
        rows: Sequence[dict[str, Any]],
        texts: Sequence[str],
        ids: Sequence[Sequence[int]],
        state: TrainerState,
        keys: Sequence[Hashable] | None = None,
    ) -> "Scores":
        """rows: the dataset row of each completion, with its `prompt`. keys: of completions that were begun."""
        scores = Scores([], {}, {}, Counter(), {})
        if keys is None:
            keys = range(len(rows))
            for key, row, text in zip(keys, rows, texts, strict=True):
                self.begin(key, row, text)

        def log_extra(column: str, values: Sequence[Any]) -> None:
            cells = [value if value is None else str(value) for value in values]
            if len(cells) != len(rows):
                raise ValueError(f"log_extra({column!r}) got {len(cells)} values for {len(rows)} completions.")
            scores.extra[column] = cells

        def log_metric(name: str, value: float) -> None:
            if name in ("step", "time"):
                raise ValueError(f"A reward function can't log a metric named {name}: every line has that already.")
            scores.metrics.setdefault(name, []).append(float(value))

        columns = {key: [row.get(key) for row in rows] for key in dict.fromkeys(key for row in rows for key in row)}
        columns.pop("prompt", None)
        prompts = [row["prompt"] for row in rows]
        completions = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        given = columns | {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": [list(tokens) for tokens in ids],
            "trainer_state": state,
            "log_extra": log_extra,
            "log_metric": log_metric,
        }
        plain = [function for function in self.functions if not isinstance(function, Grader)]
        results = iter(self._call(plain, given))
        for i, (name, function) in enumerate(zip(self.names, self.functions, strict=True)):
            if isinstance(function, Grader):
                graded = [self._begun.pop((key, i)).result() for key in keys]
                failed = [one for one in graded if one.reason is not None]
                scores.failures.update(str(one.reason) for one in failed)
                scores.failed[name] = failed
                scores.values.append(_checked(name, [one.score for one in graded], len(rows)))
            else:
                scores.values.append(_checked(name, next(results), len(rows)))
        return scores

    def _call(self, functions: Sequence[RewardFunction], given: dict[str, Any]) -> list[Any]:
        """Functions on the whole batch; those that are async are awaited together."""

        def call() -> list[Any]:
            results = [_called(function, given) for function in functions]
            if any(inspect.isawaitable(result) for result in results):
                # a notebook's thread has a loop of its own already
                results = _in_thread(lambda: asyncio.run(_together(results))).result()
            return results

        if self.timeout is None or not functions:
            return call()
        called = _in_thread(call)
        try:
            return called.result(self.timeout)
        except TimeoutError as error:
            names = ", ".join(map(reward_name, functions))
            raise ValueError(
                f"The reward functions {names} took longer than reward_timeout={self.timeout:g} s. Raise it, or see "
                "what they wait for."
            ) from error


@dataclass(frozen=True)
class Scores:
    values: list[list[float]]  # a list a function; NaN where it does not apply
    extra: dict[str, list[Any]]  # columns that functions asked to log
    metrics: dict[str, list[float]]
    failures: Counter[str]  # samples that graders failed on, by reason
    failed: dict[str, list[Graded]]  # the same samples, by the grader's name


def _in_thread(call: Callable[[], list[Any]]) -> "Future[list[Any]]":
    """The call in a thread of its own, which does not keep the process from ending if it never returns."""
    future: Future[list[Any]] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name="rewards", daemon=True).start()
    return future


async def _together(results: list[Any]) -> list[Any]:
    async def value(result: Any) -> Any:
        return await result if isinstance(result, Awaitable) else result

    return list(await asyncio.gather(*(value(result) for result in results)))


def _called(function: RewardFunction, given: dict[str, Any]) -> Any:
    """What it returns (async: an awaitable). Whatever it raises becomes an error that names it."""
    wanted = _wanted(function, given)
    try:
        result = function(**wanted)
    except Exception as error:
        raise _failure(function, error) from error
    return _awaited(function, result) if inspect.isawaitable(result) else result


async def _awaited(function: RewardFunction, result: Awaitable[Any]) -> Any:
    try:
        return await result
    except Exception as error:
        raise _failure(function, error) from error


def _failure(function: RewardFunction, error: Exception) -> ValueError:
    return ValueError(f"Reward function {reward_name(function)} raised {raised(error, __file__)}")


def _wanted(function: RewardFunction, given: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    missing = [p.name for p in named if p.default is p.empty and p.name not in given]
    if missing:
        raise ValueError(
            f"Reward function {reward_name(function)} asks for {', '.join(missing)}; there are "
            f"{', '.join(sorted(given))}."
        )
    if len(named) < len(parameters):
        return given
    return {p.name: given[p.name] for p in named if p.name in given}


def _checked(name: str, result: Any, count: int) -> list[float]:
    try:
        given = list(result)
        values = [math.nan if value is None else float(value) for value in given]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"Reward function {name} must return a list of numbers or None, not {result!r:.80}."
        ) from error
    if text := next((value for value in given if isinstance(value, str | bytes)), None):
        raise ValueError(f"Reward function {name} returned {text!r:.40}, where a number or None belongs.")
    if any(number != number and value is not None for value, number in zip(given, values, strict=True)):
        raise ValueError(f"Reward function {name} returned NaN. Where it does not apply to a completion, return None.")
    if len(values) != count:
        raise ValueError(f"Reward function {name} returned {len(values)} rewards for {count} completions.")
    if any(math.isinf(value) for value in values):
        raise ValueError(f"Reward function {name} returned an infinite reward.")
    return values


def reward_name(function: RewardFunction | Grader) -> str:
    """What its metrics are called by."""
    if isinstance(function, Grader):
        return function.name
    return getattr(function, "__name__", type(function).__name__)


def import_reward(path: str, timeout: float | None = None) -> RewardFunction | Grader:
    """A function by its dotted import path, called in this process; written module:function it is a grader, called in
    the workers, with so many seconds for a sample."""
    module, dot, name = path.rpartition(":" if ":" in path else ".")
    assert dot, f"{path} is no import path"
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:
        if file := re.match(r"(?:.*/)?(\w+)\.py\b", path):
            raise ValueError(
                f"The reward {path!r} is a file; name it as Python imports it: {file[1]}.FUNCTION, or "
                f"{file[1]}:FUNCTION for a grader in the workers. {WHERE_MODULES_ARE}"
            ) from error
        where = f"\n{WHERE_MODULES_ARE}" if isinstance(error, ImportError | AttributeError) else ""
        raise ValueError(f"The reward {path!r} can't be imported: {raised(error, __file__)}{where}") from error
    if not callable(function):
        raise ValueError(f"The reward {path!r} is not a function.")
    if ":" not in path:
        return function  # type: ignore[no-any-return]
    _require_grader(path, function)
    return Grader(name, path) if timeout is None else Grader(name, path, timeout)


def _require_grader(path: str, function: Callable[..., Any]) -> None:
    """Refuse a function that can't be called with a completion's text and its row, or that speaks of batches."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # of builtins there is none
        return
    try:
        signature.bind("text", {})
        fits = not {"prompts", "completions", "completion_ids"} & signature.parameters.keys()
    except TypeError:
        fits = False
    if not fits:
        raise ValueError(
            f"{path} takes {signature}; written with a colon it is a grader, called in the workers with one "
            f"completion's text and its row. A function of lists as TRL has them is written {path.replace(':', '.')}."
        )
