"""Sampling in waves, with a sampler of plain Python."""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext

import pytest

from qerl.config import Config
from qerl.recipe import build_config
from qerl.records import Completion, Request, Sampling
from qerl.rl.data import PromptSource
from qerl.rl.rollout import Rollout, collect, train_samples
from qerl.tasks.rewards import Rewards, TrainerState

STATE = TrainerState(1, 1)


class Echo:
    """Completion s of a prompt has the text 'id.s'; they end in a scrambled order."""

    policy_version = 0

    def stream(self, requests: Iterable[Request], sampling: Sampling) -> Iterator[Completion]:
        for request in reversed(list(requests)):
            for s in reversed(range(request.samples)):
                reason = "length" if s == 1 else "stop"
                yield Completion(
                    request.id, s, (7,) * (s + 1), f"{request.id}.{s}", (-1.0,) * (s + 1), (-1.0,) * (s + 1), reason, 0
                )

    def generate(self, requests, sampling): ...
    def on_policy_update(self): ...
    def sleep(self): ...
    def wake(self): ...


class Letters:
    """A tokenizer: one token a letter."""

    chat_template = None

    def __call__(self, text: str) -> dict:
        return {"input_ids": [ord(letter) for letter in text]}


def source(rows: int = 100, longest: int = 10) -> PromptSource:
    return PromptSource([{"prompt": f"p{i}", "n": i} for i in range(rows)], Letters(), 0, longest)


def accuracy(completions, n, **kwargs):
    """Groups of even rows vary, those of odd rows do not."""
    return [float(c.endswith(".0")) if row % 2 == 0 else 1.0 for c, row in zip(completions, n, strict=True)]


def shaping(completions, **kwargs):
    return [0.01 * i for i in range(len(completions))]


def roll(config: Config, data: PromptSource, *functions) -> Rollout:
    return collect(
        config, data, Echo(), Sampling(max_tokens=9), Rewards(functions), STATE, lambda n: None, lambda: nullcontext()
    )


def test_groups_without_variance_are_dropped_and_refilled_in_waves() -> None:
    config = build_config({"prompts_per_step": 8, "num_generations": 4, "dynamic_sampling": {"max_waves": 10}})
    data = source()
    rollout = roll(config, data, accuracy, shaping)  # shaping alone varies in every group
    assert len(rollout.groups) == 8
    assert all(group.prompt.row["n"] % 2 == 0 for group in rollout.groups)
    ids = [group.prompt.id for group in rollout.drawn]
    assert ids == list(range(data.position))  # in prompt order, nothing left out
    assert [group.prompt.id for group in rollout.groups] == [
        g.prompt.id for g in rollout.drawn if g.prompt.row["n"] % 2 == 0
    ]
    assert rollout.waves > 1
    assert [c.sample for c in rollout.groups[0].completions] == [0, 1, 2, 3]


def test_waves_are_as_large_as_what_is_missing_and_end_at_the_cap() -> None:
    config = build_config({"prompts_per_step": 8, "num_generations": 2, "dynamic_sampling": {"max_waves": 2}})
    data = source()
    rollout = roll(config, data, accuracy)
    first = [group for group in rollout.drawn[:8] if group.prompt.row["n"] % 2 == 0]
    assert len(rollout.drawn) == 8 + (8 - len(first))
    assert rollout.waves == 2
    one = build_config({"prompts_per_step": 8, "num_generations": 2, "dynamic_sampling": {"enabled": False}})
    assert len(roll(one, source(), accuracy).groups) == 8


def test_the_metric_decides_what_varies() -> None:
    values = {"prompts_per_step": 4, "num_generations": 2, "dynamic_sampling": {"metric": "shaping", "max_waves": 5}}
    assert roll(build_config(values), source(), accuracy, shaping).waves == 1
    values["dynamic_sampling"] = {"metric": "nothing"}
    with pytest.raises(ValueError, match="no reward function 'nothing'"):
        roll(build_config(values), source(), accuracy, shaping)


def test_truncated_completions_are_masked_in_the_loss_and_count_in_the_group() -> None:
    config = build_config({"prompts_per_step": 2, "num_generations": 4, "dynamic_sampling": {"enabled": False}})
    rollout = roll(config, source(), accuracy)
    samples = train_samples(config, rollout.groups)
    assert [sample.in_loss for sample in samples] == [True, False, True, True] * 2
    group = next(g for g in rollout.groups if g.prompt.row["n"] % 2 == 0)
    at = 4 * rollout.groups.index(group)
    # One of four is right: mean .25 and std .5 over all four.
    assert samples[at].advantage == pytest.approx(0.75 / (0.5 + 1e-4))
    assert samples[at + 1].advantage == pytest.approx(-0.25 / (0.5 + 1e-4))
    kept = train_samples(build_config({"mask_truncated_completions": False}), rollout.groups)
    assert all(sample.in_loss for sample in kept)


def test_every_epoch_has_its_own_order_and_a_position_says_all() -> None:
    data = source(rows=10)
    first, second = ([p.row["n"] for p in data.draw(10)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    again = source(rows=10)
    again.position = 13
    assert [p.row["n"] for p in again.draw(7)] == second[3:]
    assert [p.id for p in again.draw(2)] == [20, 21]


def test_prompts_that_are_too_long_are_passed_over() -> None:
    data = source(rows=20, longest=2)  # p0 to p9
    assert all(len(prompt.prompt_ids) == 2 for prompt in data.draw(15))
    assert data.too_long == data.position - 15 > 0
    with pytest.raises(ValueError, match="raise max_prompt_length"):
        source(longest=1).draw(1)
    with pytest.raises(ValueError, match="`prompt` column"):
        PromptSource([{"question": "x"}], Letters(), 0, 10)
