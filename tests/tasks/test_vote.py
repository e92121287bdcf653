import pytest

from qerl.tasks.vote import MAJORITY, majority, plain_majority
from qerl.tasks.workers import Workers


@pytest.mark.parametrize(
    ("answers", "scores", "score"),
    [
        (["3", "4", "3"], [1, 0, 1], 1.0),
        (["3", "4", "4"], [1, 0, 0], 0.0),
        (["3", "4"], [1, 0], 0.5),  # a tie counts by halves
        ([None, None, "3"], [0, 0, 1], 1.0),  # who has no answer does not vote
        ([None, None], [0, 0], 0.0),
        (["1/2", "0.5", "7", "\\frac{1}{2}", "7"], [1, 1, 0, 1, 0], 1.0),  # the same number, written otherwise
    ],
)
def test_the_most_frequent_answer_counts(answers: list[str | None], scores: list[float], score: float) -> None:
    assert majority("", {"answers": answers, "scores": scores}) == score


def test_votes_are_counted_in_a_worker_and_by_texts_where_that_fails() -> None:
    poll = {"answers": ["\\sqrt{8}", "2\\sqrt{2}", "5"], "scores": [1.0, 1.0, 0.0]}
    with Workers(1) as workers:
        (counted,) = workers.grade(MAJORITY, [("", poll)])
    assert counted.score == 1.0
    assert plain_majority(poll["answers"], poll["scores"]) == pytest.approx(2 / 3)
