"""What the columns of docs/study.md's tables show of a run."""

import math
from collections.abc import Callable

from measures import LAST, Run, mean_of

COLLAPSE = 0.1  # reward

Measure = Callable[[Run], float]
Measures = dict[str, tuple[Measure, str]]  # a table's columns: what, and how it is written


def reward_of_all(run: Run) -> float:
    return run.over_all("reward")


def reward_at_end(run: Run) -> float:
    return run.at_end("reward")


def rise(run: Run) -> float:
    """Of the sampled reward, from the first steps to the last: a rounded model begins lower."""
    return run.at_end("reward") - mean_of(run.steps[:LAST], "reward")


def held_out(run: Run) -> float:
    return 100 * float(run.evals[-1]["eval_accuracy"])


def held_out_before(run: Run) -> float:
    return 100 * float(run.evals[0]["eval_accuracy"])


def entropy_of_all(run: Run) -> float:
    return run.over_all("entropy")


def entropy_at_end(run: Run) -> float:
    return run.at_end("entropy")


def entropy_at_start(run: Run) -> float:
    return float(run.steps[0]["entropy"])


def least_sample_size(run: Run) -> float:
    return min(float(line["sampling/ess"]) for line in run.steps)


def largest_weight(run: Run) -> float:
    return max(float(line["sampling/importance_sampling_ratio/max"]) for line in run.steps)


def best_reward(run: Run) -> float:
    return max(float(line["reward"]) for line in run.steps)


def collapsed(run: Run) -> float:
    """1 if the run ends with hardly any reward."""
    return float(run.at_end("reward") < COLLAPSE)


def worse(run: Run) -> float:
    """1 if training has made it worse."""
    return float(held_out(run) < held_out_before(run))


def pass_at_1(run: Run) -> float:
    """Of the same samples as pass@8."""
    return 100 * float(run.pass8["pass@1"]["value"]) if run.pass8 else math.nan


def pass_at_8(run: Run) -> float:
    return 100 * float(run.pass8["pass@8"]["value"]) if run.pass8 else math.nan


def gain(run: Run) -> float:
    return held_out(run) - held_out_before(run)


RISE: Measures = {"all steps": (reward_of_all, ".3f"), "last 5": (reward_at_end, ".3f")}
BEFORE: Measures = {"held out before, %": (held_out_before, ".1f")}
AFTER: Measures = {"held out after, %": (held_out, ".1f")}
ENTROPY: Measures = {"entropy": (entropy_of_all, ".3f")}
ENTROPIES: Measures = {
    "step 1": (entropy_at_start, ".3f"),
    "all steps": (entropy_of_all, ".3f"),
    "last 5": (entropy_at_end, ".3f"),
}
STABILITY: Measures = {"best step": (best_reward, ".3f"), "collapsed": (collapsed, ".0%"), "worse": (worse, ".0%")}
WEIGHTS: Measures = {"least ESS": (least_sample_size, ".3f"), "largest weight": (largest_weight, ".1f")}
DIFFERENCES: Measures = {
    "greedy after, %": (held_out, ".1f"),
    "gain, %": (gain, ".1f"),
    "pass@8, %": (pass_at_8, ".1f"),
    "reward, all steps": (reward_of_all, ".3f"),
    "reward, last 5": (reward_at_end, ".3f"),
    "reward, rise": (rise, ".3f"),
    "entropy, all steps": (entropy_of_all, ".3f"),
}
NOISY: Measures = RISE | ENTROPY | WEIGHTS | AFTER
GSM8K: Measures = {
    "greedy before, %": (held_out_before, ".1f"),
    "after, %": (held_out, ".1f"),
    "sampled after, %": (pass_at_1, ".1f"),
    "pass@8, %": (pass_at_8, ".1f"),
    "reward, all steps": (reward_of_all, ".3f"),
    "reward, last 5": (reward_at_end, ".3f"),
    "entropy, step 1": (entropy_at_start, ".3f"),
    "entropy, last 5": (entropy_at_end, ".3f"),
    "least ESS": (least_sample_size, ".3f"),
}
