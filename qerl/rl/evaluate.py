"""Held-out prompts, continued greedily by the clean policy, scored by the rewards of training."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from qerl.generate import encode
from qerl.records import Sampler, Sampling
from qerl.rl.data import DrawnPrompt
from qerl.rl.ranks import ALONE, Ranks
from qerl.rl.rollout import Group, draw_groups, require_graded
from qerl.tasks.rewards import Rewards, TrainerState


def evaluate(
    rows: Sequence[dict[str, Any]],
    tokenizer: Any,
    sampler: Sampler,
    sampling: Sampling,
    rewards: Rewards,
    state: TrainerState,
    ranks: Ranks = ALONE,
) -> tuple[dict[str, float], list[Group]]:
    """Metrics with `eval_` in front, and the groups of one completion each; every rank takes its share and gets them
    all. Noise is off whatever `sampling` says."""
    clean = replace(sampling, temperature=0.0, noise=False)
    prompts = [DrawnPrompt(i, dict(row), encode(tokenizer, row["prompt"])) for i, row in enumerate(rows)]
    groups, scores = draw_groups(sampler, prompts, 1, clean, rewards, state, ranks=ranks)
    if state.global_step == 0:
        require_graded(scores.failed, len(groups))
    lengths = [len(group.completions[0].token_ids) for group in groups]
    clipped = [group.completions[0].finish_reason == "length" for group in groups]
    metrics = {
        "eval_reward": _mean([float(group.total_G[0]) for group in groups]),
        "eval_completions/mean_length": _mean(lengths),
        "eval_completions/clipped_ratio": _mean(clipped),
    }
    for i, name in enumerate(rewards.names):
        metrics[f"eval_rewards/{name}/mean"] = _mean([float(group.rewards_GF[0, i]) for group in groups])
    index = rewards.accuracy_index()
    if index is not None:
        metrics["eval_accuracy"] = metrics[f"eval_rewards/{rewards.names[index]}/mean"]
    return metrics, groups


def _mean(values: Sequence[float]) -> float:
    """Over numbers; NaN, a reward that does not apply, is left out."""
    numbers = [value for value in values if value == value]
    return sum(numbers) / len(numbers) if numbers else float("nan")
