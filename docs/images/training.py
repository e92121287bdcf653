"""training.png: `python docs/images/training.py SMOLLM2_METRICS.jsonl[.gz] RUN ...` (runs of the default job)."""

import gzip
import json
import sys
from pathlib import Path

from matplotlib.figure import Figure


def series(path: Path, key: str) -> tuple[list[int], list[float]]:
    open_ = gzip.open if path.suffix == ".gz" else open
    with open_(path, "rt") as file:
        lines = [json.loads(line) for line in file]
    found = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
    return [step for step, _ in found], [value for _, value in found]


smollm2, *runs = map(Path, sys.argv[1:])
figure = Figure(figsize=(10, 3.4), layout="constrained")
accuracy, length, real = figure.subplots(1, 3)
for i, run in enumerate(runs):
    accuracy.plot(*series(run / "metrics.jsonl", "eval_accuracy"), marker="o", color=f"C{i}", label=f"seed {i}")
    accuracy.plot(*series(run / "metrics.jsonl", "accuracy"), color=f"C{i}", alpha=0.3)
    length.plot(*series(run / "metrics.jsonl", "completions/mean_length"), color=f"C{i}")
real.plot(*series(smollm2, "accuracy"), alpha=0.4, label="sampled")
real.plot(*series(smollm2, "eval_accuracy"), marker="o", label="held out, greedy")
accuracy.set_title("default job: accuracy (faint: sampled)")
length.set_title("default job: tokens a completion")
real.set_title("SmolLM2-135M, sums: accuracy")
for axes in (accuracy, length, real):
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
for axes in (accuracy, real):
    axes.set_ylim(0, 1)
    axes.legend(fontsize=7)
figure.savefig(Path(__file__).with_name("training.png"), dpi=110)
