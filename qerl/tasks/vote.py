r"""The answer that most of a question's samples give, and its score (maj@k).

Answers that mean the same vote together: `0.5` and `\frac{1}{2}`. Whether two are the same may take a computer algebra
system, so `majority` is a grader, which runs in a worker and can be timed out; `plain_majority` then goes by texts.
"""

from collections.abc import Callable, Sequence
from typing import Any

from qerl.tasks.grader import Grader
from qerl.tasks.math_answer import same_answer

MAJORITY = Grader("majority", "qerl.tasks.vote:majority", timeout=60.0)


def majority(text: str, row: dict[str, Any]) -> float:
    """Columns `answers` (None: a sample has none) and `scores`, an entry a sample. The text is not looked at."""
    return winning_score(row["answers"], row["scores"], same_answer)


def plain_majority(answers: Sequence[str | None], scores: Sequence[float]) -> float:
    """The same where only equal texts are the same answer."""
    return winning_score(answers, scores, lambda one, other: one.strip() == other.strip())


def winning_score(answers: Sequence[str | None], scores: Sequence[float], same: Callable[[str, str], bool]) -> float:
    """The mean score of the largest party, of all of them in a tie. Samples without an answer do not vote; where none
    has one, the score is 0."""
    parties: list[tuple[str, list[float]]] = []
    for answer, score in zip(answers, scores, strict=True):
        if answer is None:
            continue
        party = next((votes for first, votes in parties if same(first, answer)), None)
        if party is None:
            parties.append((answer, [score]))
        else:
            party.append(score)
    most = max((len(votes) for _, votes in parties), default=0)
    winners = [sum(votes) / len(votes) for _, votes in parties if len(votes) == most]
    return sum(winners) / len(winners) if winners else 0.0
