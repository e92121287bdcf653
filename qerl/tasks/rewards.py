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
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from qerl.tasks.grader import Grader
from qerl.tasks.workers import Graded, Workers

RewardFunction = Callable[..., Any]


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

    def score(
        self,
        rows: Sequence[dict[str, Any]],
        texts: Sequence[str],
        ids: Sequence[Sequence[int]],
        state: TrainerState,
        keys: Sequence[Hashable] | None = None,
    ) -> "Scores":
        """rows: the dataset row of each completion, with its `prompt`. keys: of completions that were begun."""
        scores = Scores([], {}, {}, Counter())
        if keys is None:
            keys = range(len(rows))
            for key, row, text in zip(keys, rows, texts, strict=True):
                self.begin(key, row, text)

        def log_extra(column: str, values: Sequence[Any]) -> None:
            scores.extra[column] = list(values)

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
                scores.failures.update(one.reason for one in graded if one.reason is not None)
                scores.values.append(_checked(name, [one.score for one in graded], len(rows)))
            else:
                scores.values.append(_checked(name, next(results), len(rows)))
        return scores

    def _call(self, functions: Sequence[RewardFunction], given: dict[str, Any]) -> list[Any]:
        """Functions on the whole batch; those that are async are awaited together."""

        def call() -> list[Any]:
            results = [function(**_wanted(function, given)) for function in functions]
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
            if called.done():  # the function's own
                raise
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
        values = [math.nan if value is None else float(value) for value in result]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"Reward function {name} must return a list of numbers or None, not {result!r:.80}."
        ) from error
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
    if not dot:
        raise ValueError(
            f"There is no reward {path!r}; write a registered name or a dotted path such as my_rewards.accuracy."
        )
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"The reward {path!r} can't be imported: {error}. Modules are found in the folder that the command runs in "
            "and wherever Python finds them (PYTHONPATH)."
        ) from error
    if not callable(function):
        raise ValueError(f"The reward {path!r} is not a function.")
    if ":" not in path:
        return function  # type: ignore[no-any-return]
    return Grader(name, path) if timeout is None else Grader(name, path, timeout)
