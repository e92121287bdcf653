import subprocess
import sys

import pytest

from qerl.tasks.arithmetic import (
    LEVELS,
    Problem,
    accuracy,
    direct,
    distinct,
    extract_answer,
    problem,
    split_of,
    worked,
    works,
)


def test_the_same_arguments_give_the_same_problem_and_others_another() -> None:
    assert problem(0, 5) == problem(0, 5)
    assert len({problem(seed, index, (4,)).prompt for seed in range(2) for index in range(50)}) == 100


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_level_is_the_number_of_digits_and_answers_are_right(level: int, split: str) -> None:
    for index in range(100):
        one = problem(1, index, (level,), split)
        left, right = one.prompt.removesuffix("=").split("+")
        assert len(left) == len(right) == level
        assert int(one.answer) == int(left) + int(right)
        assert one.numbers == (int(left), int(right))
        assert split_of(one.numbers) == split


def test_no_problem_is_in_both_splits_in_either_order() -> None:
    def seen(split: str) -> set[tuple[int, ...]]:
        return {tuple(sorted(problem(seed, i, (1, 2), split).numbers)) for seed in range(3) for i in range(1000)}

    assert not seen("train") & seen("test")
    assert all(split_of((a, b)) == split_of((b, a)) for a in range(40) for b in range(40))


def test_there_are_thousands_of_held_out_problems() -> None:
    held_out = distinct(2000, 0)
    assert len({one.prompt for one in held_out}) == 2000
    assert all(split_of(one.numbers) == "test" for one in held_out)
    with pytest.raises(ValueError, match="fewer than 100 problems"):
        distinct(100, 0, (1,))


def test_levels_and_splits_that_there_are_not_are_refused() -> None:
    for levels in ((), (0,), (2, 9)):
        with pytest.raises(ValueError, match="choose one or more of 1, 2, 3, 4"):
            problem(0, 0, levels)
    with pytest.raises(ValueError, match="train or test"):
        problem(0, 0, split="dev")


def test_both_ways_of_answering_are_right() -> None:
    one = Problem("347+589=", "936", (347, 589))
    assert direct(one) == "<answer>936</answer>"
    assert worked(one) == "<think>7+9+0=16 4+8+1=13 3+5+1=09</think><answer>936</answer>"
    assert works(worked(one))
    assert not works(direct(one))
    for index in range(200):
        one = problem(2, index, LEVELS)
        assert accuracy(direct(one), one.answer) == accuracy(worked(one), one.answer) == 1.0
        for step in worked(one).removeprefix("<think>").split("</think>")[0].split(" "):
            terms, total = step.split("=")
            assert sum(map(int, terms.split("+"))) == int(total)


def test_only_the_exact_final_answer_counts() -> None:
    right = ["<answer>42</answer>", "x<answer>1</answer><answer> 42 </answer>\n", "<think>4</think><answer>42</answer>"]
    wrong = [
        "",
        "42",
        "<answer>42",
        "<answer>042</answer>",
        "<answer>42</answer>1",
        "<answer>42</answer><answer>4</answer>",
    ]
    assert [accuracy(text, "42") for text in right] == [1.0] * 3
    assert [accuracy(text, "42") for text in wrong] == [0.0] * 6
    assert extract_answer("no tags") is None
    assert extract_answer("<answer>7</answer><answer>8</answer>") == "8"


def test_the_task_needs_no_torch() -> None:
    code = "import sys, qerl.tasks.arithmetic; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
