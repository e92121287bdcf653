"""Curves of groups of runs over each other: every run thin, the mean of a group thick, its range shaded."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qerl.compare.curves import band, curve
from qerl.compare.runs import Group

# panel: the metric's key. A panel of which no run measured anything is left out.
PANELS = {
    "reward": "reward",
    "accuracy, sampled": "accuracy",
    "reward, held out": "eval_reward",
    "accuracy, held out": "eval_accuracy",
    "entropy (nats)": "entropy",
    "noise, sigma": "noise/sigma",
    "mean length (tokens)": "completions/mean_length",
    "rollout, tokens/s": "rollout/tokens_per_s",
}
COLUMNS = 3
FEW = 20  # points that are marked one by one


def plot_groups(groups: Sequence[Group], folder: Path) -> list[Path]:
    """by_step.png and by_seconds.png."""
    folder.mkdir(parents=True, exist_ok=True)
    return [_picture(groups, over, folder / f"by_{over}.png") for over in ("step", "seconds")]


def _picture(groups: Sequence[Group], over: str, path: Path) -> Path:
    from matplotlib.figure import Figure

    panels = {
        title: key
        for title, key in PANELS.items()
        if any(len(curve(run, key, over).x) for group in groups for run in group.runs)
    }
    rows = max(1, -(-len(panels) // COLUMNS))
    figure = Figure(figsize=(4 * COLUMNS, 2.8 * rows + 0.5), layout="constrained")
    grid = figure.subplots(rows, COLUMNS, squeeze=False).flatten()
    for axes, (title, key) in zip(grid, panels.items(), strict=False):
        for number, group in enumerate(groups):
            _draw(axes, group, key, over, f"C{number % 10}")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step" if over == "step" else "seconds of steps and evaluations")
        axes.grid(alpha=0.3)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    if panels:
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(groups)), fontsize=9)
    figure.savefig(path, dpi=100)
    return path


def _draw(axes: Any, group: Group, key: str, over: str, colour: str) -> None:
    curves = [curve(run, key, over) for run in group.runs]
    together = band(curves, over)
    label = f"{group.label} ({len(group.runs)} runs)" if len(group.runs) > 1 else group.label
    if len(curves) > 1:
        for each in curves:
            axes.plot(each.x, each.y, color=colour, linewidth=0.6, alpha=0.35)
    if together is None:
        axes.plot([], [], color=colour, label=label)  # in the legend nonetheless
        return
    axes.plot(together.x, together.mean, color=colour, label=label, marker="o" if 1 < len(together.x) < FEW else None)
    axes.fill_between(together.x, together.low, together.high, color=colour, alpha=0.15, linewidth=0)
