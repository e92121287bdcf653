"""Pictures of a run, from its metrics."""

from pathlib import Path
from typing import Any

from qerl.metrics import read_metrics

PLOTS = {
    "reward": (("reward", "reward"), ("eval_reward", "held out, greedy")),
    "accuracy": (("accuracy", "sampled"), ("eval_accuracy", "held out, greedy")),
    "entropy": (("entropy", "clean policy"),),
    "sigma": (("noise/sigma", "noise"),),
    "length": (("completions/mean_length", "mean"), ("completions/max_length", "longest")),
}


PLACE = (0.14, 0.14, 0.83, 0.77)  # left, bottom, width, height of the axes: a layout engine draws everything twice


def plot_run(metrics: Path, folder: Path) -> list[Path]:
    """reward, accuracy, entropy, sigma and length against steps, a PNG each, of what the run measured."""
    from matplotlib.figure import Figure

    lines = read_metrics(metrics)
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, series in PLOTS.items():
        figure = Figure(figsize=(6, 3.6))
        axes = figure.add_axes(PLACE)
        drawn = [_draw(axes, lines, key, label) for key, label in series]
        if not any(drawn):
            continue
        axes.set_xlabel("step")
        axes.set_title(name)
        axes.grid(alpha=0.3)
        axes.legend()
        made.append(folder / f"{name}.png")
        figure.savefig(made[-1], dpi=120)
    return made


def _draw(axes: Any, lines: list[dict[str, Any]], key: str, label: str) -> bool:
    points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), marker="o" if len(points) < 20 else None, label=label)
    return bool(points)
