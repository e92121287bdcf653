"""Format, length and repetition."""

import pytest

from qerl.tasks import think_format
from qerl.tasks.grader import Grader
from qerl.tasks.shaping import length, repeated_share, repetition, soft_overlong
from qerl.tasks.shipped import BY_LENGTH, GRADERS, reward_named


@pytest.mark.parametrize(
    ("text", "soft", "strict"),
    [
        ("<think>a</think><answer>b</answer>", 1, 1),
        ("  <think>\na\n</think>\n<answer>\nb\n</answer>\n", 1, 1),
        ("a</think><answer>b</answer>", 1, 1),  # the template opened the thought
        ("<think>a</think> so <answer>b</answer>", 1, 0),
        ("<think>a</think><answer>b</answer> done", 1, 0),
        ("<think></think><answer>b</answer>", 1, 0),
        ("<think>a</think><answer> </answer>", 1, 0),
        ("<think>a</think>b", 0.5, 0),
        ("<think>a", 0.25, 0),
        ("<answer>b</answer>", 0.5, 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.5, 0),
        ("<answer>b</answer><think>a</think>", 0, 0),
        ("b", 0, 0),
        ("", 0, 0),
    ],
)
def test_think_format(text: str, soft: float, strict: float) -> None:
    assert think_format.soft(text, {}) == soft
    assert think_format.strict(text, {}) == strict


def test_soft_overlong_is_dapos() -> None:
    reward = soft_overlong(100, cache=20)
    ids = [[0] * n for n in (0, 80, 85, 90, 100, 120)]
    assert reward(completion_ids=ids, prompts=[]) == [0, 0, -0.25, -0.5, -1, -1]
    assert soft_overlong(100)(completion_ids=ids) == reward(completion_ids=ids)
    assert reward.__name__ == "soft_overlong"
    for cache in (0, 101, -1):
        with pytest.raises(ValueError, match="between 1 and 100"):
            soft_overlong(100, cache)


def test_length_falls_from_short_to_long() -> None:
    values = length(100)(completion_ids=[[0] * n for n in (0, 25, 50, 75, 100, 150)])
    assert values[0] == 0
    assert values[2] == pytest.approx(-0.5)
    assert values[4] == values[5] == -1
    assert values == sorted(values, reverse=True)
    assert length(10, short=-1.0, long=0.0)(completion_ids=[[0] * 10]) == [0]


def test_repetition() -> None:
    assert repetition("one two three four five six", {}) == 0
    assert repetition("too short", {}) == 0
    assert repetition("", {}) == 0
    assert repetition("a b c d " * 100, {}) == pytest.approx(-(1 - 4 / 397))
    assert repeated_share("x x x x x x", 2) == pytest.approx(0.8)
    assert repeated_share("我很好我很好", 3) == pytest.approx(0.25)


def test_shipped_rewards_by_name() -> None:
    for name in GRADERS:
        found = reward_named(name, {}, 100)
        assert isinstance(found, Grader)
        module, _, function = found.path.partition(":")
        assert module.startswith("qerl.tasks.")
        assert function
    for name in BY_LENGTH:
        found = reward_named(name, {}, 100)
        assert callable(found)
        assert found.__name__ == name
    with pytest.raises(ValueError, match=r"Did you mean gsm8k_accuracy\?.*math_accuracy.*module:function"):
        reward_named("gsm8k_acuracy", {}, 100)
    assert reward_named("own", {"own": GRADERS["repetition"]}, 100) is GRADERS["repetition"]
