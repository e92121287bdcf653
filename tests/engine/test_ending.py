"""The rules by which a sequence ends, on numbers alone."""

import math

import pytest

from qerl.engine.ending import Ending
from qerl.engine.sequence import Sequence
from qerl.records import Sampling


def sequence(most: int = 10) -> Sequence:
    return Sequence(0, 7, 1, (1, 2), most)


def drawn(tokens: list[int]) -> tuple[list[int], list[float], list[float]]:
    return tokens, [-0.5 * i for i in range(len(tokens))], [-0.25 * i for i in range(len(tokens))]


def ending(**options: object) -> Ending:
    return Ending(Sampling(max_tokens=10, **options), None, version=3, noise_version=5)


def test_what_is_drawn_past_a_stop_is_dropped() -> None:
    rules, one = ending(stop_ids=(9,)), sequence()
    assert rules.keep({one: drawn([4, 9, 9, 5])}, has_nan=False) == {one: [4, 9]}
    one.output += [4, 9]
    assert rules.ended() == [(one, "stop")]
    assert rules.ended() == []  # told once
    done = rules.completion(one, "stop")
    assert (done.token_ids, done.logprobs, done.policy_logprobs) == ((4, 9), (0.0, -0.5), (0.0, -0.25))
    assert (done.request, done.sample, done.finish_reason, done.policy_version) == (7, 1, "stop", 3)
    assert done.noise_id is None  # it was sampled without noise


def test_a_sequence_ends_at_its_length_over_several_looks() -> None:
    rules, one = ending(), sequence(most=6)
    for tokens in ([1, 2, 3, 4], [5, 6, 7, 8]):
        one.output += rules.keep({one: drawn(tokens)}, has_nan=False)[one]
    assert one.output == [1, 2, 3, 4, 5, 6]
    assert rules.ended() == [(one, "length")]
    assert len(rules.completion(one, "length").logprobs) == 6


def test_nan_counts_up_to_the_end_only() -> None:
    rules, one = ending(stop_ids=(9,)), sequence()
    past = ([9, 4], [-0.5, math.nan], [-0.5, math.nan])
    assert rules.keep({one: past}, has_nan=True) == {one: [9]}
    with pytest.raises(ValueError, match="NaN logits"):
        rules.keep({sequence(): ([4, 9], [math.nan, -0.5], [math.nan, -0.5])}, has_nan=True)
