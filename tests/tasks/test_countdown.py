"""Countdown: every generated problem has a solution that scores; what breaks a rule does not."""

from fractions import Fraction

import pytest

from qerl.tasks import countdown

ROW = {"numbers": [3, 5, 7, 7], "target": 24}


def test_problems_are_solvable_repeatable_and_split() -> None:
    problems = {split: [countdown.problem(1, i, split) for i in range(200)] for split in ("train", "test")}
    for split, found in problems.items():
        for one in found:
            assert countdown.accuracy(f"<answer>{one['solution']}</answer>", one) == 1
            assert countdown.accuracy(f"<answer>{one['solution']} + 1</answer>", one) == 0
            assert countdown.split_of(one["numbers"], one["target"]) == split
    assert problems["train"] == [countdown.problem(1, i) for i in range(200)]
    assert countdown.problem(2, 0) != countdown.problem(1, 0)


WRONG = (
    *("(5 - 3) * (5 + 7)", "7 * (3 + 5) / 7 + 0", "3 * 5 + 7", "24", "3 * 5 + 7 + 7 - 5", "3*5+7+7", "57 - 33", ""),
    *("__import__('os')", "3 ** 5", "-3 + 5 + 7 + 7", "(3 + 5", "3 + 5)", "3 5 + 7 + 7", "7/(7-7)*3*5", "3+5+7+7="),
    *("(" * 300, "3.0*5+7+2", "7 + 7 + 5 * 2", "3 + 7 + 7 + 5 + 2 = 24"),
)


@pytest.mark.parametrize("answer", WRONG)
def test_wrong(answer: str) -> None:
    assert countdown.accuracy(f"<answer>{answer}</answer>", ROW) == 0


@pytest.mark.parametrize(
    "text",
    [
        "<answer>3 * (7 + 5) - 12</answer>",
        "<answer>$3 \\times (7 + 5) - 12$</answer>",
        "<think>?</think><answer>(7 + 5) × 3 − 12 = 24</answer>",  # noqa: RUF001
        "\\boxed{3 * [7 + 5] - 12}",
    ],
)
def test_right(text: str) -> None:
    assert countdown.accuracy(text, {"nums": [3, 5, 7, 12], "target": 24}) == 1


def test_rows_without_numbers_do_not_apply() -> None:
    assert countdown.accuracy("<answer>1</answer>", {"target": 1}) is None
    assert countdown.accuracy("1", ROW) == 0


def test_evaluate_is_exact() -> None:
    assert countdown.evaluate("1/3 + 1/3 + 1/3") == (Fraction(1), [1, 3, 1, 3, 1, 3])
    assert countdown.evaluate("8 - 4 - 2")[0] == 2
    assert countdown.evaluate("8 / 4 / 2")[0] == 1
    assert countdown.evaluate("2 + 3 * 4")[0] == 14
