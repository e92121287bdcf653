"""A task's one reward at work on an evaluation's completions, and what its scores were given by.

A line of samples carries the mark of its grading (`graded_by`): of the reward's module, as its file is now, and of the
question's row. A score with another mark, or one that a grader's exception left, is not taken over.
"""

import hashlib
import json
import sys
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from qerl.evaluation.questions import Questions
from qerl.evaluation.results import Line
from qerl.tasks.grader import Grader
from qerl.tasks.rewards import Rewards, TrainerState, reward_name
from qerl.tasks.workers import Graded, Workers

STATE = TrainerState(0, 0)


class Grading:
    """Graders work on a completion from `begin` on; functions are called by `grade`."""

    def __init__(self, questions: Questions, workers: Workers) -> None:
        self.questions, self.workers, self.reward = questions, workers, questions.reward
        self._begun: dict[Hashable, Future[Graded]] = {}
        self._source = _source(self.reward)

    @property
    def again(self) -> bool:
        """Whether a completion's text is all that the reward reads of it: a function may read its tokens too."""
        return isinstance(self.reward, Grader)

    def mark(self, question: int) -> str:
        """What a score of this question is given by."""
        row = json.dumps(dict(self.questions.rows[question]), sort_keys=True, default=str)
        return hashlib.sha256(f"{self._source}\n{row}".encode()).hexdigest()[:16]

    def holds(self, line: Line) -> bool:
        """Whether an earlier line's score would be given today."""
        return line.get("graded_by") == self.mark(line["id"]) and line.get("grading_error", {}).get("reason") != "error"

    def begin(self, key: Hashable, question: int, text: str) -> None:
        if isinstance(self.reward, Grader):
            self._begun[key] = self.workers.submit(self.reward, text, self.questions.rows[question])

    def grade(
        self, keys: Sequence[tuple[int, int]], texts: Sequence[str], ids: Sequence[Sequence[int]]
    ) -> list[Graded]:
        """keys: question and sample of each; a grader starts now on those that were not begun."""
        if isinstance(self.reward, Grader):
            for key, text in zip(keys, texts, strict=True):
                if key not in self._begun:
                    self.begin(key, key[0], text)
            return [self._begun.pop(key).result() for key in keys]
        rows = [dict(self.questions.rows[question]) for question, _ in keys]
        (values,) = Rewards([self.reward]).score(rows, texts, ids, STATE).values
        return [Graded(None if value != value else value) for value in values]


def marks(graded: Graded) -> dict[str, Any]:
    """What a line says of its grading: the score, and why it is no real one."""
    failed = {} if graded.reason is None else {"grading_error": {"reason": graded.reason, "detail": graded.detail}}
    return {"score": graded.score} | failed


def _source(reward: Any) -> str:
    """The reward's address and its module's file as it is now."""
    if isinstance(reward, Grader):
        address, module = reward.path, reward.path.partition(":")[0]
    else:
        module = getattr(reward, "__module__", None) or ""
        address = f"{module}.{reward_name(reward)}"
    spec = find_spec(module) if module and module != "__main__" else None
    file = spec.origin if spec else getattr(sys.modules.get(module), "__file__", None)
    code = Path(file).read_bytes() if file and Path(file).is_file() else b""
    return f"{address} {hashlib.sha256(code).hexdigest()}"
