import itertools
import math

import numpy as np
import pytest

from qerl.evaluation.estimators import estimate, paired, pass_at_k, wilson

stats = pytest.importorskip("scipy.stats")


def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples() -> None:
    for samples in range(1, 7):
        for right in range(samples + 1):
            scores = [i < right for i in range(samples)]
            for k in range(1, samples + 1):
                chosen = list(itertools.combinations(scores, k))
                assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))
    assert pass_at_k(1000, 1, 1000) == 1.0
    with pytest.raises(ValueError, match="pass@3"):
        pass_at_k(2, 1, 3)


@pytest.mark.parametrize(("right", "count"), [(0, 30), (30, 30), (1, 1), (7, 40), (430, 1319)])
def test_zeros_and_ones_get_wilsons_interval(right: int, count: int) -> None:
    judge = stats.binomtest(right, count).proportion_ci(method="wilson")
    found = wilson(right, count)
    assert (found.value, found.low, found.high) == pytest.approx((right / count, judge.low, judge.high))
    assert estimate([1.0] * right + [0.0] * (count - right)) == found


def test_shares_get_a_bootstrap_over_questions() -> None:
    values = np.random.default_rng(1).integers(0, 9, 120) / 8
    judge = stats.bootstrap((values,), np.mean, method="percentile", random_state=2).confidence_interval
    found = estimate(values.tolist())
    assert found.value == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx((judge.low, judge.high), abs=0.01)
    assert found == estimate(values.tolist())
    assert math.isnan(estimate([]).value)


def test_few_or_equal_shares_get_an_interval_that_is_not_a_point() -> None:
    for values in ([0.5, 0.5], [0.5] * 40, [0.25, 0.75]):
        judge = stats.binomtest(len(values) // 2, len(values)).proportion_ci(method="wilson")
        found = estimate(values)
        assert (found.value, found.low, found.high) == pytest.approx((0.5, judge.low, judge.high))


def test_a_paired_comparison_sees_what_unpaired_scores_hide() -> None:
    draw = np.random.default_rng(3)
    a = (draw.random(300) < 0.5).astype(float)
    b = np.where(draw.random(300) < 0.05, 1.0, a)  # a little better on a few questions, never worse
    found = paired(a.tolist(), b.tolist())
    judge = stats.bootstrap((b - a,), np.mean, method="percentile", random_state=4).confidence_interval
    assert found.value == pytest.approx((b - a).mean())
    assert (found.low, found.high) == pytest.approx((judge.low, judge.high), abs=0.005)
    assert found.p_value < 0.05 < stats.ttest_ind(a, b).pvalue
    assert paired(a.tolist(), a.tolist()).p_value == 1.0
    assert paired(b.tolist(), a.tolist()).value == -found.value


def test_p_values_of_equal_models_are_spread_evenly() -> None:
    draw = np.random.default_rng(5)
    flips = [(draw.integers(0, 2, 60), draw.integers(0, 2, 60)) for _ in range(40)]
    p_values = [paired(a.tolist(), b.tolist()).p_value for a, b in flips]
    assert stats.kstest(p_values, "uniform").pvalue > 0.01


def test_a_comparison_needs_pairs() -> None:
    with pytest.raises(ValueError, match="same questions"):
        paired([1.0], [])
