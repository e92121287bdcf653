"""Graders of mathematics: the completion's final answer against the row's `answer`."""

from typing import Any

from qerl.tasks.extract import answer_line, extract, only_number, spoken
from qerl.tasks.math_answer import same_answer
from qerl.tasks.number import parse_number

DAPO_TAIL = 300  # characters from the end in which DAPO looks for `Answer:`


def accuracy(text: str, row: dict[str, Any]) -> float | None:
    """1 if the final answer, in whatever form it is given, is the right one, else 0."""
    right = right_answer(row)
    if right is None:
        return None
    given = extract(text)
    return float(given is not None and same_answer(right, given))


def gsm8k(text: str, row: dict[str, Any]) -> float | None:
    """As `accuracy` for a number, which may also be the last one in prose, or the only one in the answer's words."""
    right = right_answer(row)
    if right is None:
        return None
    given = gsm8k_answer(text)
    if given is None:
        return 0.0
    number, wanted = parse_number(given), parse_number(right)
    if wanted is None:
        return float(same_answer(right, given))
    return float(number is not None and wanted.equals(number))


def gsm8k_answer(text: str) -> str | None:
    """What `gsm8k` takes for the answer: the number after the last `=`, else the only one, else the words."""
    given = extract(text, prose=True)
    if given is None:
        return None
    last = given.rpartition("=")[2]
    if parse_number(last) is not None:
        return last.strip()
    return only_number(given) or given


def dapo(text: str, row: dict[str, Any]) -> float | None:
    """DAPO's score: 1 if the line `Answer: ..` at the end has the right answer, else -1."""
    right = right_answer(row)
    if right is None:
        return None
    given = dapo_answer(text)
    return 1.0 if given is not None and same_answer(right, given) else -1.0


def dapo_answer(text: str) -> str | None:
    said = spoken(text)
    return None if said is None else answer_line(said.rstrip(), DAPO_TAIL)


def right_answer(row: dict[str, Any]) -> str | None:
    """The row's answer as text, of a solution that ends in `#### N` only that; None: the row has none."""
    value = row.get("answer")
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value).rpartition("####")[2].strip()
    return text or None
