"""Draws the pictures of the README and docs from what the package computes: python docs/images/make.py"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from qerl.bench.formats import measure
from qerl.model.memory import weight_bytes
from qerl.model.shapes import SHAPES

SIZES = ("3b", "7b", "14b", "32b")
COLOURS = {"bf16": "#9aa5b1", "nvfp4": "#2f7d32", "mxfp4": "#81b784", "nf4": "#c58b2b"}


def main() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), constrained_layout=True)
    at = np.arange(len(SIZES))
    for shift, format in ((-0.2, "bf16"), (0.2, "nvfp4")):
        gigabytes = [weight_bytes(SHAPES[f"qwen2.5-{size}"], format).total / 1e9 for size in SIZES]
        bars = left.bar(at + shift, gigabytes, 0.38, label=format, color=COLOURS[format])
        left.bar_label(bars, fmt="%.1f", fontsize=8)
    left.axhline(24, color="grey", lw=0.8, ls=":")
    left.text(-0.45, 25, "a 24 GB card", fontsize=8, color="grey")
    left.set_xticks(at, [f"Qwen2.5-{size.upper()}" for size in SIZES])
    left.set_ylabel("weights, GB")
    left.set_title("What the weights take")
    left.legend(frameon=False)

    rows = measure()
    kinds = list(dict.fromkeys(row.weights for row in rows))
    for i, format in enumerate(("nvfp4", "mxfp4", "nf4")):
        of = [row for row in rows if row.format == format]
        x = np.arange(len(kinds)) + (i - 1) * 0.28
        right.bar(x, [row.rtn for row in of], 0.24, color=COLOURS[format], alpha=0.4)
        right.bar(x, [row.mse for row in of], 0.24, color=COLOURS[format], label=f"{format} ({of[0].bits} bits)")
    right.set_xticks(np.arange(len(kinds)), kinds)
    right.set_ylabel("mean squared error / variance")
    right.set_title("What rounding costs (pale: rtn, full: mse)")
    right.legend(frameon=False)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(__file__).parent / "formats.png", dpi=130)


if __name__ == "__main__":
    main()
