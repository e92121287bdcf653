r"""Scores of a set of questions, with intervals and comparisons: pure functions of numbers.

With c of a question's n samples right, the chance that at least one of k draws without replacement is right is

    pass@k = 1 - C(n - c, k) / C(n, k)

which is unbiased for every k <= n (Chen et al. 2021). Questions are the unit of all uncertainty: samples of one
question are not independent, so intervals and p-values draw whole questions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
FEW = 10  # questions; of fewer, a bootstrap's interval is too narrow, of equal ones a point
PIECE = 1 << 22  # numbers drawn at a time
Z95 = 1.959963984540054  # the normal distribution's 97.5 % point


@dataclass(frozen=True)
class Estimate:
    """A mean over questions and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """How much better b is than a, question by question, with a 95 % interval and a two-sided p-value."""

    value: float
    low: float
    high: float
    p_value: float


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The chance that one of k of these samples is right."""
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(f"pass@{k} of {right} right ones in {samples} samples is not defined.")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def estimate(values: Sequence[float], seed: int = 0) -> Estimate:
    """The mean over questions, each from 0 to 1. Where each counts 0 or 1, or all are equal, or they are few, the
    interval is Wilson's: shares of the same mean vary no more than zeros and ones, so it is rather too wide for them.
    Else it is a bootstrap over questions."""
    if not values:
        return Estimate(math.nan, math.nan, math.nan)
    if len(values) < FEW or len(set(values)) == 1 or all(value in (0.0, 1.0) for value in values):
        return wilson(math.fsum(values), len(values))
    low, high = np.quantile(_resampled(values, seed), (0.025, 0.975))
    return Estimate(float(np.mean(values)), float(low), float(high))


def wilson(right: float, count: int) -> Estimate:
    """Wilson's score interval of a proportion; right may be a sum of shares."""
    share, room = right / count, Z95 * Z95 / count
    middle = (share + room / 2) / (1 + room)
    half = math.sqrt(share * (1 - share) * room + room * room / 4) / (1 + room)
    return Estimate(share, max(0.0, middle - half), min(1.0, middle + half))


def paired(a: Sequence[float], b: Sequence[float], seed: int = 0) -> Difference:
    """b - a by a bootstrap over questions that both answered. The p-value is the share of resamples whose difference,
    moved so that its mean is 0, lies as far out as the one seen; one is added above and below, so it is never 0."""
    if len(a) != len(b) or not a:
        raise ValueError(f"A paired comparison needs the same questions on both sides, not {len(a)} and {len(b)}.")
    differences = [after - before for before, after in zip(a, b, strict=True)]
    means = _resampled(differences, seed)
    seen = float(np.mean(differences))
    low, high = np.quantile(means, (0.025, 0.975))
    farther = int(np.sum(np.abs(means - seen) >= abs(seen) - 1e-12))
    return Difference(seen, float(low), float(high), (farther + 1) / (RESAMPLES + 1))


def _resampled(values: Sequence[float], seed: int) -> NDArray[np.float64]:
    """Means of RESAMPLES draws of as many questions, with replacement."""
    numbers, draw = np.asarray(values, dtype=np.float64), np.random.default_rng(seed)
    rows = max(1, PIECE // len(numbers))
    means = [
        numbers[draw.integers(len(numbers), size=(min(rows, RESAMPLES - start), len(numbers)))].mean(axis=1)
        for start in range(0, RESAMPLES, rows)
    ]
    return np.concatenate(means)
