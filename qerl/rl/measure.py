"""The metrics of a step, with TRL's names, and its completions as a Parquet table."""

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from qerl.rl.advantage import NO_VARIANCE, group_std
from qerl.rl.rollout import Rollout
from qerl.rl.update import Tally
from qerl.tasks.rewards import Rewards
from qerl.tasks.workers import REASONS


def rollout_metrics(rollout: Rollout, rewards: Rewards, wanted: int) -> dict[str, Any]:
    """Of everything that was drawn, dropped groups included."""
    groups, completions = rollout.drawn, rollout.completions
    total_PG = torch.stack([group.total_G for group in groups])
    rewards_SF = torch.cat([group.rewards_GF for group in groups])
    lengths = [len(completion.token_ids) for completion in completions]
    std_P = group_std(total_PG)
    metrics: dict[str, Any] = {
        "reward": float(total_PG.nanmean()),
        "reward_std": float(group_std(total_PG.flatten())),
        "frac_reward_zero_std": float((std_P <= NO_VARIANCE).double().mean()),
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": sum(c.finish_reason == "length" for c in completions) / len(completions),
        "dynamic_sampling/kept": len(rollout.groups),
        "dynamic_sampling/resampled": len(groups) - wanted,
        "dynamic_sampling/waves": rollout.waves,
    }
    metrics |= {f"grading/{reason}": rollout.failures[reason] for reason in REASONS if rewards.workers is not None}
    for i, name in enumerate(rewards.names):
        metrics[f"rewards/{name}/mean"] = float(rewards_SF[:, i].nanmean())
        metrics[f"rewards/{name}/std"] = float(group_std(rewards_SF[:, i]))
    index = rewards.accuracy_index()
    if index is not None:
        metrics["accuracy"] = metrics[f"rewards/{rewards.names[index]}/mean"]
    return {name: sum(values) / len(values) for name, values in rollout.metrics.items()} | metrics


def update_metrics(tally: Tally, results: list[dict[str, float]], beta: float) -> dict[str, Any]:
    """Of the step's updates. Where nothing was trained on there is no entropy, nor a ratio."""
    metrics: dict[str, Any] = {
        "loss": sum(r["loss"] for r in results) / max(1, len(results)),
        "grad_norm": sum(r["grad_norm"] for r in results) / max(1, len(results)),
        "updates/skipped": sum(r["skipped"] for r in results),
        "updates/tokens": int(tally.sums["computed"]),  # a group's prompt once
    }
    if not tally.tokens:
        return metrics
    metrics |= {
        "entropy": tally.mean("entropy"),
        "clip_ratio/low_mean": tally.mean("low"),
        "clip_ratio/high_mean": tally.mean("high"),
        "clip_ratio/region_mean": tally.mean("low") + tally.mean("high"),
        "sampling/sampling_logp_difference/mean": tally.mean("difference"),
        "sampling/sampling_logp_difference/max": tally.largest["difference"],
        "sampling/importance_sampling_ratio/min": tally.smallest["ratio"],
        "sampling/importance_sampling_ratio/mean": tally.mean("ratio"),
        "sampling/importance_sampling_ratio/max": tally.largest["ratio"],
        "sampling/capped": tally.mean("touched"),
        "sampling/ess": tally.effective_sample_size,
    } | tally.measured
    return metrics | ({"kl": tally.mean("kl")} if beta else {})


def peak_memory_gb(device: torch.device) -> float:
    """On a GPU what torch allocated at most since the last reset; on a CPU the process's peak so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def completions_table(step: int, rollout: Rollout, rewards: Rewards, advantages: list[float]) -> dict[str, list[Any]]:
    """Columns, one row a completion; `advantage` is empty for dropped groups."""
    trained = iter(advantages)
    kept = {id(group) for group in rollout.groups}
    columns: dict[str, list[Any]] = {"step": [], "prompt": [], "completion": []}
    columns |= {name: [] for name in rewards.names} | {"advantage": []}
    for group in rollout.drawn:
        prompt = group.prompt.row["prompt"]
        for completion, earned in zip(group.completions, group.rewards_GF.tolist(), strict=True):
            columns["step"].append(step)
            columns["prompt"].append(prompt if isinstance(prompt, str) else json.dumps(prompt))
            columns["completion"].append(completion.text)
            for name, value in zip(rewards.names, earned, strict=True):
                columns[name].append(None if value != value else value)
            columns["advantage"].append(next(trained) if id(group) in kept else None)
    for name, values in rollout.extra.items():
        if name not in columns:
            columns[name] = [*values, *[None] * (len(columns["step"]) - len(values))]
    return columns


def write_completions(path: Path, columns: dict[str, list[Any]]) -> None:
    """As Parquet; the file appears whole."""
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    pyarrow.parquet.write_table(pyarrow.table(columns), partial)
    partial.rename(path)
