"""Generated sums: problems in levels, with held-out ones that no training can meet, and their grader.

A problem of level n is a sum of two numbers of n digits, such as `347+589=`. A completion ends in
`<answer>936</answer>`; what stands before it, such as work between think tags, is the model's own affair. Every problem
belongs to one split by a hash of its two numbers, in either order: train and test can't overlap, whatever the seeds.
"""

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "test"]

SPLITS = ("train", "test")
LEVELS = (1, 2, 3, 4)
DEFAULT_LEVELS = (2, 3, 3, 4, 4)  # one is drawn for each problem: 3 and 4 twice as often as 2
TEST_SHARE = 26 / 256

ANSWER = re.compile(r"<answer>([^<>]*)</answer>")


@dataclass(frozen=True)
class Problem:
    prompt: str
    answer: str
    numbers: tuple[int, int]


def problem(seed: int, index: int, levels: Sequence[int] = DEFAULT_LEVELS, split: Split = "train") -> Problem:
    """The same arguments always give the same problem; other indices may give it again (see `distinct`)."""
    if not levels or not set(levels) <= set(LEVELS):
        raise ValueError(f"Levels {list(levels)}: choose one or more of {', '.join(map(str, LEVELS))}.")
    if split not in SPLITS:
        raise ValueError(f"There is no split {split!r}; choose train or test.")
    draw = random.Random(f"{seed} {index} {split}")
    level = draw.choice(levels)
    least = 10 ** (level - 1) if level > 1 else 0
    while True:
        numbers = (draw.randrange(least, 10**level), draw.randrange(least, 10**level))
        if split_of(numbers) == split:
            return Problem(f"{numbers[0]}+{numbers[1]}=", str(sum(numbers)), numbers)


def split_of(numbers: tuple[int, int]) -> Split:
    """Where this sum belongs, whatever the order of its numbers."""
    key = "{}+{}".format(*sorted(numbers)).encode()
    return "test" if hashlib.sha256(key).digest()[0] < TEST_SHARE * 256 else "train"


def distinct(count: int, seed: int, levels: Sequence[int] = DEFAULT_LEVELS, split: Split = "test") -> list[Problem]:
    """So many different problems, the first that `problem` gives for indices 0, 1, 2 and so on."""
    found: dict[str, Problem] = {}
    for index in range(20 * count):
        one = problem(seed, index, levels, split)
        found.setdefault(one.prompt, one)
        if len(found) == count:
            return list(found.values())
    raise ValueError(
        f"Levels {list(levels)} hold fewer than {count} problems of {split}. Ask for fewer, or add a level."
    )


def direct(one: Problem) -> str:
    """The completion that answers at once."""
    return f"<answer>{one.answer}</answer>"


def worked(one: Problem) -> str:
    """The completion that adds digit by digit, from the right, and then answers.

    A step is two digits, the carry so far and their sum in two digits: the same width for all, which a small model
    learns soonest.
    """
    steps, carry = [], 0
    for a, b in zip(*(reversed(str(number)) for number in one.numbers), strict=True):
        total = int(a) + int(b) + carry
        steps.append(f"{a}+{b}+{carry}={total:02}")
        carry = total // 10
    return f"<think>{' '.join(steps)}</think>{direct(one)}"


def works(completion: str) -> bool:
    """Whether a completion sets out to work before it answers."""
    return completion.startswith("<think>")


def extract_answer(completion: str) -> str | None:
    """What stands in the last answer tags, or None where there are none."""
    found = ANSWER.findall(completion)
    return found[-1].strip() if found else None


def accuracy(completion: str, answer: str) -> float:
    """1 if the completion ends in exactly this answer, else 0; a completion that was cut off has none."""
    return float(completion.rstrip().endswith("</answer>") and extract_answer(completion) == answer)
