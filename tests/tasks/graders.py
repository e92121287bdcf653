"""Graders for the tests of the workers, some of them up to no good."""

import os
import re
import signal
import time
from typing import Any


def length(text: str, row: dict[str, Any]) -> float:
    return float(len(text)) + row.get("plus", 0)


def raises(text: str, row: dict[str, Any]) -> float:
    raise KeyError("no")


def echo(text: str, row: dict[str, Any]) -> float | None:
    """The text says what to do; anything else is the score."""
    if text == "loop":
        while True:
            pass
    if text == "sleep":
        time.sleep(1000)
    if text == "regex":
        re.match(r"(a+)+$", "a" * 60 + "b")
    if text == "exponent":
        return float(len(str(7 ** (10**9))))
    if text == "memory":
        return float(len("x" * 10**10))
    if text == "recursion":
        return echo(text, row)
    if text == "exit":
        os._exit(0)
    if text == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    if text == "system exit":
        raise SystemExit(0)
    if text == "raise":
        raise RuntimeError("no")
    if text == "alarm":
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        return 1.0
    if text == "nan":
        return float("nan")
    if text == "none":
        return None
    if text == "print":
        print("to stdout", flush=True)  # noqa: T201
        return 1.0
    return float(text)


def process(text: str, row: dict[str, Any]) -> float:
    """The worker's own number."""
    return float(os.getpid())


def kind(text: str, row: dict[str, Any]) -> float:
    return float(type(row["value"]).__name__ == text)


def drawn(text: str, row: dict[str, Any]) -> float:
    import random

    return random.random() + sum(ord(letter) for letter in next(iter({"a", "bc", "d", "e"})))


def prepare() -> None:
    """What a grader wants done before its first sample."""
    os.environ["GRADER_READY"] = str(os.getpid())


def prepared(text: str, row: dict[str, Any]) -> float:
    return float(os.environ.get("GRADER_READY") == str(os.getpid()))


def slowly() -> None:
    time.sleep(0.8)


def unprepared() -> None:
    raise RuntimeError("no licence for sympy")


def sum_accuracy(text: str, row: dict[str, Any]) -> float:
    from qerl.tasks.arithmetic import accuracy

    return accuracy(text, row["answer"])
