"""Prompts in a fixed order: every epoch its own shuffle, and a position that says all about where a run is."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qerl.generate import encode


@dataclass(frozen=True)
class DrawnPrompt:
    """A prompt as it was drawn. Its id is its position: unique over the run, so that a second epoch draws other
    tokens."""

    id: int
    row: dict[str, Any]
    prompt_ids: tuple[int, ...]


class PromptSource:
    """Draws rows of a data set; those whose prompt is too long are passed over, and counted."""

    def __init__(self, rows: Sequence[dict[str, Any]], tokenizer: Any, seed: int, max_prompt_length: int) -> None:
        if len(rows) == 0:
            raise ValueError("The training data has no rows.")
        if "prompt" not in rows[0]:
            raise ValueError(f"A row needs a `prompt` column; this data has {', '.join(rows[0])}.")
        self.rows, self.tokenizer, self.seed, self.max_prompt_length = rows, tokenizer, seed, max_prompt_length
        self.position = 0  # of the next draw
        self.too_long = 0
        self._epoch, self._order = -1, [0]

    def draw(self, count: int) -> list[DrawnPrompt]:
        drawn: list[DrawnPrompt] = []
        passed = 0
        while len(drawn) < count:
            row = dict(self.rows[self._index(self.position)])
            ids = encode(self.tokenizer, row["prompt"])
            if 0 < len(ids) <= self.max_prompt_length:
                drawn.append(DrawnPrompt(self.position, row, ids))
                passed = 0
            else:
                self.too_long += 1
                passed += 1
                if passed >= len(self.rows):
                    raise ValueError(
                        f"No prompt of the data has 1 to {self.max_prompt_length} tokens: all are empty or longer. "
                        "Look at the column `prompt`, or raise max_prompt_length."
                    )
            self.position += 1
        return drawn

    def _index(self, position: int) -> int:
        epoch, at = divmod(position, len(self.rows))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self.rows)))
            random.Random(f"{self.seed} {epoch}").shuffle(self._order)
        return self._order[at]
