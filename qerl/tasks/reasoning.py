"""reasoning-gym's generators as tasks (`reasoning_gym:leg_counting`), and their grader. An extra: `pip install
'qerl[reasoning]'`.

A question belongs to one split by a hash of its text, so that train and test can't overlap, whatever the generator
draws. The grader is the generator's own, on the text between the answer tags; some give part marks.
"""

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import Any

from qerl.tasks.extract import extract

PREFIX = "reasoning_gym:"
LENGTH = 100_000  # training rows of a generator
TRIES = 64
TEST_SEED = 1_000_003
TEST_SHARE = 26  # of 256


class Generated(Sequence[dict[str, Any]]):
    """Training rows, made when they are asked for."""

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self.entries = _generator(name, seed * 7_919, LENGTH * TRIES)
        self[0]  # refuses a generator that does not work now

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: Any) -> Any:
        for attempt in range(TRIES):
            entry = self.entries[index + attempt * LENGTH]
            if split_of(entry["question"]) == "train":
                return _row(self.name, entry)
        raise ValueError(f"{PREFIX}{self.name} makes too few different questions to hold any out.")


def test_rows(name: str, count: int) -> list[dict[str, Any]]:
    """Different held-out questions, the same for every seed; fewer where the generator has no more."""
    found: dict[str, dict[str, Any]] = {}
    entries = _generator(name, TEST_SEED, count * TRIES)
    for index in range(count * TRIES):
        entry = entries[index]
        if split_of(entry["question"]) == "test":
            found.setdefault(entry["question"], _row(name, entry))
        if len(found) == count:
            break
    return list(found.values())


def accuracy(text: str, row: dict[str, Any]) -> float | None:
    """The generator's score of the answer, 0 to 1."""
    if "entry" not in row:
        return None
    given = extract(text)
    if given is None:
        return 0.0
    return max(0.0, min(1.0, float(_scorer(row["generator"])(given, row["entry"]))))


def split_of(question: str) -> str:
    return "test" if hashlib.sha256(question.encode()).digest()[0] < TEST_SHARE else "train"


def _row(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    return {"question": entry["question"], "answer": entry["answer"], "generator": name, "entry": entry}


def _generator(name: str, seed: int, size: int) -> Any:
    gym = _gym()
    if name not in gym.factory.DATASETS:
        raise ValueError(f"reasoning-gym has no generator {name!r}; it has {', '.join(sorted(gym.factory.DATASETS))}.")
    return gym.create_dataset(name, seed=seed, size=size)


@cache
def _scorer(name: str) -> Any:
    return _gym().get_score_answer_fn(name)


def _gym() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ValueError("reasoning_gym tasks need reasoning-gym: pip install 'qerl[reasoning]'.") from error
    return reasoning_gym
