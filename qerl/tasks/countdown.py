"""Countdown: reach a target with the given numbers, each used exactly once, by + - * / and brackets.

Problems are generated backwards from a solution, so that each has one; a hash of the problem says which split it
belongs to, so that train and test can't overlap. An answer is worked out by a small parser in exact fractions.
"""

import hashlib
import random
import re
from collections import Counter
from fractions import Fraction
from typing import Any, Literal

from qerl.tasks.extract import extract

MAX_LENGTH = 256  # characters of an expression
TEST_SHARE = 16  # of 256
_TOKEN = re.compile(r"\s*(\d{1,9}|[-+*/()])")
_SPELLINGS = {
    **{"\\times": "*", "\\cdot": "*", "\\div": "/", "×": "*", "·": "*", "÷": "/", "−": "-", "\\left": ""},  # noqa: RUF001
    **{"\\right": "", "[": "(", "]": ")"},
}


def problem(seed: int, index: int, split: Literal["train", "test"] = "train") -> dict[str, Any]:
    """numbers (3 or 4 of 1 to 99), target (1 to 999) and a solution; the same for the same arguments."""
    draw = random.Random(f"countdown {seed} {index} {split}")
    while True:
        numbers = [draw.randint(1, 99) for _ in range(draw.choice((3, 4)))]
        parts: list[tuple[int, str]] = [(number, str(number)) for number in numbers]
        while len(parts) > 1:
            (a, left), (b, right) = (parts.pop(draw.randrange(len(parts))) for _ in range(2))
            choices = [(a + b, "+"), (a * b, "*")] + [(a - b, "-")] * (a > b) + [(a // b, "/")] * (a % b == 0)
            value, sign = draw.choice(choices)
            parts.append((value, f"({left} {sign} {right})"))
        target, solution = parts[0]
        if 1 <= target <= 999 and split_of(numbers, target) == split:
            return {"numbers": numbers, "target": target, "solution": solution[1:-1]}


def split_of(numbers: list[int], target: int) -> Literal["train", "test"]:
    key = f"{sorted(numbers)} {target}".encode()
    return "test" if hashlib.sha256(key).digest()[0] < TEST_SHARE else "train"


def accuracy(text: str, row: dict[str, Any]) -> float | None:
    """1 if the answer's expression uses exactly the row's `numbers` (or `nums`) and makes its `target`, else 0."""
    numbers, target = row.get("numbers", row.get("nums")), row.get("target")
    if numbers is None or target is None:
        return None
    given = extract(text)
    if given is None:
        return 0.0
    left, equals, right = given.partition("=")
    if equals and right.strip() != str(target):
        return 0.0
    try:
        value, used = evaluate(left)
    except ValueError:
        return 0.0
    return float(Counter(used) == Counter(int(n) for n in numbers) and value == Fraction(target))


def evaluate(expression: str) -> tuple[Fraction, list[int]]:
    """The value of an expression, and the numbers in it; ValueError where it is none."""
    for spelling, sign in _SPELLINGS.items():
        expression = expression.replace(spelling, sign)
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"An expression has at most {MAX_LENGTH} characters.")
    tokens, at = [], 0
    expression = expression.strip().strip("$").rstrip()
    while at < len(expression):
        found = _TOKEN.match(expression, at)
        if not found:
            raise ValueError(f"{expression[at : at + 10]!r} is no number, sign or bracket.")
        tokens.append(found.group(1))
        at = found.end()
    used: list[int] = []
    value, end = _sum(tokens, 0, used)
    if end != len(tokens):
        raise ValueError(f"{tokens[end]!r} is out of place.")
    return value, used


def _sum(tokens: list[str], at: int, used: list[int]) -> tuple[Fraction, int]:
    value, at = _product(tokens, at, used)
    while at < len(tokens) and tokens[at] in "+-":
        other, end = _product(tokens, at + 1, used)
        value, at = (value + other if tokens[at] == "+" else value - other), end
    return value, at


def _product(tokens: list[str], at: int, used: list[int]) -> tuple[Fraction, int]:
    value, at = _atom(tokens, at, used)
    while at < len(tokens) and tokens[at] in "*/":
        other, end = _atom(tokens, at + 1, used)
        if tokens[at] == "/" and other == 0:
            raise ValueError("A division by zero.")
        value, at = (value * other if tokens[at] == "*" else value / other), end
    return value, at


def _atom(tokens: list[str], at: int, used: list[int]) -> tuple[Fraction, int]:
    if at < len(tokens) and tokens[at].isdigit():
        used.append(int(tokens[at]))
        return Fraction(tokens[at]), at + 1
    if at < len(tokens) and tokens[at] == "(":
        value, at = _sum(tokens, at + 1, used)
        if at < len(tokens) and tokens[at] == ")":
            return value, at + 1
    raise ValueError("A number or a bracket is missing.")
