"""Rewards for how a completion is written, whatever it answers: its length and its repetitions.

Lengths are counted in tokens, which only the trainer knows: such rewards are made here as functions by TRL's contract.
Each looks at one completion alone, never at its group, so that they may be worked out while others are still sampled.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

LengthReward = Callable[..., list[float]]

NGRAM = 4  # words
_WORD = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]|\w+|[^\w\s]")


def soft_overlong(max_completion_length: int, cache: int | None = None) -> LengthReward:
    """DAPO's soft overlong punishment: 0 up to `max_completion_length - cache` tokens, then down on a line to -1 at
    `max_completion_length`. The cache is a fifth of the length where it is not given."""
    limit = max_completion_length
    cache = max(1, limit // 5) if cache is None else cache
    if not 0 < cache <= limit:
        raise ValueError(f"The cache of soft_overlong is {cache} tokens; it must lie between 1 and {limit}.")

    def soft_overlong(completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        return [max(-1.0, min(0.0, (limit - cache - len(ids)) / cache)) for ids in completion_ids]

    return soft_overlong


def length(max_completion_length: int, short: float = 0.0, long: float = -1.0) -> LengthReward:
    """From `short` for an empty completion to `long` for one of full length, along half a cosine wave: flat at both
    ends. Swap the two to ask for longer completions."""
    limit = max_completion_length
    if limit < 1:
        raise ValueError(f"The length reward needs a positive max_completion_length, not {limit}.")

    def length(completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        shares = [min(1.0, len(ids) / limit) for ids in completion_ids]
        return [long + (short - long) * (1 + math.cos(math.pi * share)) / 2 for share in shares]

    return length


def repetition(text: str, row: dict[str, Any]) -> float:
    """A grader: minus the share of n-grams of words that stood in the completion before; 0 is best, -1 worst."""
    return -repeated_share(text)


def repeated_share(text: str, n: int = NGRAM) -> float:
    words = _WORD.findall(text.casefold())
    ngrams = list(zip(*(words[i:] for i in range(n)), strict=False))
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
