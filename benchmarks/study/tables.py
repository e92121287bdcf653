"""The tables and pictures of docs/study.md from results/: `python benchmarks/study/tables.py`.

A table stands in the page between `<!-- NAME -->` and `<!-- end -->` and is written anew; the words around it are by
hand.
"""

import argparse
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import ablations
from columns import (
    AFTER,
    BEFORE,
    DIFFERENCES,
    ENTROPIES,
    ENTROPY,
    GSM8K,
    NOISY,
    RISE,
    STABILITY,
    Measures,
    held_out,
    reward_at_end,
    reward_of_all,
)
from measures import Run, bootstrap, interval, markdown, paired, read_lines, read_runs
from speed import large_rank_table, memory_table, rank_table, speed_table, step_table

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs" / "study.md"
IMAGES = ROOT / "docs" / "images"

RATE = {"learning_rate": 1e-3}
QUIET = {"noise.schedule": "off", **RATE}
CORRECTED = {"correction.form": "token", **RATE}
FORMATS = {
    "bf16 + LoRA": {"base": "bf16", **QUIET},
    "NVFP4 + LoRA": {"base": "nvfp4", **QUIET},
    "MXFP4 + LoRA": {"base": "mxfp4", **QUIET},
    "NF4 + LoRA (QLoRA)": {"base": "nf4", **QUIET},
    "full, learning rate 3e-4": {"base": "full", "learning_rate": 3e-4},
}
SCHEDULES = {"no noise": {"base": "nvfp4", **QUIET}} | {
    name: {"base": "nvfp4", "noise.schedule": name, "noise.sigma_start": 0.5, **CORRECTED}
    for name in ("exponential", "linear", "cosine", "logarithmic")
}
LEARNING_RATES = (1e-3, 3e-3, 5e-3, 1e-2)
RATES = {
    f"{name}, {rate:g}": {"base": base, "noise.schedule": "off", "learning_rate": rate}
    for rate in LEARNING_RATES
    for name, base in (("bf16", "bf16"), ("NVFP4", "nvfp4"))
}
STRONG = {"base": "nvfp4", "noise.schedule": "exponential", "noise.sigma_start": 0.5, **RATE}
LOOP = {"base": "nvfp4", "noise.schedule": "entropy", **CORRECTED}
NOISE = {
    "no noise": {"base": "nvfp4", **QUIET},
    "0.01 to 0.0001": {"base": "nvfp4", "noise.schedule": "exponential", "noise.sigma_start": 1e-2, **CORRECTED},
    "0.05 to 0.0005": {"base": "nvfp4", "noise.schedule": "exponential", "noise.sigma_start": 5e-2, **CORRECTED},
    "0.5 to 0.005": STRONG | CORRECTED,
    "0.5 to 0.005, no correction": STRONG | {"correction.form": "off"},
    "0.5 to 0.005, masked": STRONG | {"correction.form": "masked"},
    "0.5 to 0.005, one weight a sequence": STRONG | {"correction.form": "sequence"},
    "by entropy, from 0.01 to 0.1 at most": LOOP | {"noise.sigma_max": 0.1},
    "by entropy, to 1 at most": LOOP | {"noise.sigma_max": 1.0, "noise.target_entropy": None},
    "by entropy, to 1, target falling": LOOP | {"noise.sigma_max": 1.0, "noise.target_entropy": [0.18, 0.04]},
}
NOISE_ON_BF16 = {
    "bf16, no noise": {"base": "bf16", **QUIET},
    "bf16, 0.5 to 0.005": {"base": "bf16", "noise.schedule": "exponential", "noise.sigma_start": 0.5, **CORRECTED},
}
RANKS = {f"r = {r}": {"base": "nvfp4", "lora_r": r, "lora_alpha": 2 * r, **QUIET} for r in (16, 32, 64, 128)}
PROFILES = {
    "no noise": {"base": "nvfp4", **QUIET},
    "the same in all blocks": STRONG | CORRECTED | {"noise.profile": "uniform"},
    "growing with depth": STRONG | CORRECTED | {"noise.profile": "linear"},
}
FIVE = {
    "bf16 + LoRA": {"base": "bf16", "noise.schedule": "off"},
    "NF4 + LoRA (QLoRA)": {"base": "nf4", "noise.schedule": "off"},
    "NVFP4 + LoRA": {"base": "nvfp4", "noise.schedule": "off"},
    "NVFP4 + AQN": {"base": "nvfp4", "noise.schedule": "exponential", "noise.sigma_start": 1e-2},
    "NVFP4 + entropy-targeted AQN": {"base": "nvfp4", "noise.schedule": "entropy"},
}
PAIRS = [
    ("NVFP4 + LoRA", "bf16 + LoRA"),
    ("NF4 + LoRA (QLoRA)", "bf16 + LoRA"),
    ("NVFP4 + LoRA", "NF4 + LoRA (QLoRA)"),
    ("NVFP4 + AQN", "NVFP4 + LoRA"),
    ("NVFP4 + entropy-targeted AQN", "NVFP4 + LoRA"),
    ("NVFP4 + AQN", "bf16 + LoRA"),
]
FEW = 6  # arms of a picture whose bands can still be told apart
PAPERS_RATE = {"bf16 + LoRA": 5e-6}  # others 1e-5


def arms_table(runs: list[Run], arms: dict[str, dict[str, Any]], measures: Measures, compared: str = "") -> str:
    """A row an arm: the mean over seeds of each measure, and of the one `compared` the difference to the first arm,
    seed by seed, with its 95 % interval."""
    first = next(iter(arms))
    reference = [run for run in runs if run.is_of(arms[first])]
    head = ["", "seeds", *measures, *([f"{compared}: less {first}'s"] if compared else [])]
    rows = []
    for label, arm in arms.items():
        found = [run for run in runs if run.is_of(arm)]
        if len({run.seed for run in found}) < len(found):
            raise ValueError(f"The arm {label} has several runs of one seed: {', '.join(run.name for run in found)}.")
        if not found:
            rows.append([label, "0", "not measured yet", *[""] * (len(head) - 3)])
            continue
        cells = [label, str(len(found)), *(mean_cell(map(m, found), form) for m, form in measures.values())]
        if compared:
            measure, form = measures[compared]
            spread = interval(paired(found, reference, measure)) if label != first else None
            cells.append("" if spread is None else f"{spread[0]:+{form}} ± {spread[1]:{form}}")
        rows.append(cells)
    return markdown(head, rows)


def mean_cell(values: Iterable[float], form: str) -> str:
    """Of the runs that have it, and how many where not all do: pass@8 needs an adapter that is still there."""
    every = list(values)
    found = [value for value in every if not math.isnan(value)]
    if not found:
        return "not measured"
    return format(mean(found), form) + (f" ({len(found)} seeds)" if len(found) < len(every) else "")


def differences_table(
    runs: list[Run], arms: dict[str, dict[str, Any]], pairs: Sequence[tuple[str, str]], measures: Measures
) -> str:
    """A row a pair of arms: one less the other, seed by seed, with the 95 % interval (of one seed there is none) and
    how many seeds both have."""
    rows = []
    for one, other in pairs:
        cells = [f"{one} less {other}"]
        for measure, form in measures.values():
            values = paired(*([run for run in runs if run.is_of(arms[name])] for name in (one, other)), measure)
            found = [value for value in values if not math.isnan(value)]
            spread = interval(found)
            width = f" ± {spread[1]:{form}}" if spread else ""
            cells.append(f"{mean(found):+{form}}{width} ({len(found)})" if found else "not measured")
        rows.append(cells)
    return markdown(["", *measures], rows)


def rates_table(runs: list[Run], rates: Sequence[float], arms: dict[str, dict[str, Any]]) -> str:
    """NVFP4 less bf16, seed by seed, at each learning rate."""
    rows = []
    for rate in rates:
        four, sixteen = ([run for run in runs if run.is_of(arms[f"{name}, {rate:g}"])] for name in ("NVFP4", "bf16"))
        cells = [f"{rate:g}", str(len(paired(four, sixteen, reward_at_end)))]
        for measure, form in ((reward_of_all, ".3f"), (reward_at_end, ".3f"), (held_out, ".1f")):
            spread = interval(paired(four, sixteen, measure))
            cells.append("" if spread is None else f"{spread[0]:+{form}} ± {spread[1]:{form}}")
        rows.append(cells)
    return markdown(["learning rate", "seeds", "all steps", "last 5", "held out after, %"], rows)


def entropy_table(path: Path) -> str:
    """Entropy before training, by format, and its change against bf16: with a bootstrap over prompts, or where
    something was drawn several times ("NAME, 0", "NAME, 1") the mean and range over draws."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for line in read_lines(path):
        by_name.setdefault(line["format"], []).append(line)
    rows = []
    for name in dict.fromkeys(name.partition(", ")[0] for name in by_name):
        draws = [lines for key, lines in by_name.items() if key.partition(", ")[0] == name]
        cells = [name if len(draws) == 1 else f"{name}, {len(draws)} draws"]
        for kind in ("own", "same"):
            plain = totals(by_name["bf16"], kind)
            pairs = [[(*a, *b) for a, b in zip(totals(lines, kind), plain, strict=True)] for lines in draws]
            found = [bootstrap(rows, change_in_percent) for rows in pairs]
            values = [value for value, _, _ in found]
            low, high = found[0][1:] if len(found) == 1 else (min(values), max(values))
            cells.append(f"{mean(sum(r[0] for r in rows) / sum(r[1] for r in rows) for rows in pairs):.4f}")
            cells.append("" if name == "bf16" else f"{mean(values):+.1f} ({low:+.1f} to {high:+.1f})")
        longer = [
            sum(r[1] for r in totals(x, "own")) / sum(r[1] for r in totals(by_name["bf16"], "own")) for x in draws
        ]
        rows.append([*cells, f"{100 * mean(longer):.0f}"])
    return markdown(["", "own samples", "change, %", "bf16's samples", "change, %", "length, % of bf16's"], rows)


def totals(lines: list[dict[str, Any]], kind: str) -> list[tuple[float, float]]:
    """Of each prompt: the sum of its tokens' entropies, and how many tokens."""
    return [(line[kind] * line[f"{kind}_tokens"], line[f"{kind}_tokens"]) for line in lines]


def change_in_percent(sums: Any) -> Any:
    """Sums [..., 4] of entropy and tokens, of one format and of bf16 -> change of entropy a token."""
    return 100 * (sums[..., 0] / sums[..., 1] * sums[..., 3] / sums[..., 2] - 1)


def five_arms(papers: bool) -> dict[str, dict[str, Any]]:
    """At one learning rate for all, or at the paper's."""
    return {
        label: arm | {"learning_rate": PAPERS_RATE.get(label, 1e-5) if papers else 1e-4} for label, arm in FIVE.items()
    }


def gsm8k_table(runs: list[Run], papers: bool) -> str:
    return arms_table(runs, five_arms(papers), GSM8K, "after, %")


def alike(runs: list[Run], *keys: str) -> list[Run]:
    """Those that have the recipe's rank and profile of noise, or what of these is named: tables of other things."""
    recipe = {"lora_r": 16, "noise.profile": "uniform"}
    return [run for run in runs if run.is_of({key: recipe[key] for key in keys or recipe})]


def tables() -> dict[str, str]:
    every = read_runs(RESULTS / "tiny.jsonl.xz")
    tiny, one_rank = alike(every), alike(every, "lora_r")
    gsm8k, sums = read_runs(RESULTS / "gsm8k.jsonl.xz"), read_runs(RESULTS / "sums.jsonl.xz")
    made = {
        "entropy by format": entropy_table(RESULTS / "entropy_tiny.jsonl.xz"),
        "entropy by format, 0.5B": entropy_table(RESULTS / "entropy_gsm8k.jsonl.xz"),
        "entropy in training": arms_table(tiny, FORMATS, ENTROPIES, "all steps"),
        "reward by format": arms_table(tiny, FORMATS, RISE, "all steps"),
        "accuracy by format": arms_table(tiny, FORMATS, BEFORE | AFTER, "held out after, %"),
        "learning rates": arms_table(tiny, RATES, RISE | STABILITY | AFTER),
        "learning rates, difference": rates_table(tiny, LEARNING_RATES, RATES),
        "schedules": arms_table(tiny, SCHEDULES, RISE | AFTER, "last 5"),
        "profiles": arms_table(one_rank, PROFILES, NOISY, "last 5"),
        "ranks": arms_table(every, RANKS, RISE | ENTROPY | AFTER, "last 5"),
        "noise": arms_table(tiny, NOISE, NOISY, "last 5"),
        "noise on bf16": arms_table(tiny, NOISE_ON_BF16, NOISY, "last 5"),
        "speed": speed_table("model", "batch", timed="every step", new_tokens=lambda n: int(n) <= 256),
        "speed by length": speed_table("model", "batch", "new_tokens", new_tokens=lambda n: int(n) > 512),
        "speed by rank": rank_table(),
        "speed by rank, larger models": large_rank_table(),
        "whole steps": step_table(),
        "memory": memory_table(),
        "gsm8k, equal learning rate": gsm8k_table(gsm8k, papers=False),
        "gsm8k, equal learning rate, differences": differences_table(gsm8k, five_arms(False), PAIRS, DIFFERENCES),
        "gsm8k, the paper's learning rates": gsm8k_table(gsm8k, papers=True),
    }
    return made | (sums_tables(sums) if sums else {})


def sums_tables(runs: list[Run]) -> dict[str, str]:
    """The 135M's."""
    formats = RISE | ENTROPY | BEFORE | AFTER
    return {
        "135M, formats": arms_table(runs, ablations.FORMATS, formats, "all steps"),
        "135M, learning rates": arms_table(runs, ablations.RATES, RISE | STABILITY | AFTER),
        "135M, learning rates, difference": rates_table(runs, ablations.LEARNING_RATES, ablations.RATES),
        "135M, schedules": arms_table(runs, ablations.SCHEDULES, NOISY, "last 5"),
        "135M, profiles": arms_table(runs, ablations.PROFILES, NOISY, "last 5"),
        "135M, noise": arms_table(runs, ablations.NOISE, NOISY, "last 5"),
        "135M, ranks": arms_table(runs, ablations.RANKS, RISE | ENTROPY | AFTER, "last 5"),
    }


def filled(page: str, made: dict[str, str]) -> str:
    """The page with every marked table written anew. A mark without a table, or the other way round, is an error."""
    marks = re.findall(r"<!-- (?!end)(.+?) -->", page)
    if sorted(marks) != sorted(made):
        raise ValueError(f"{PAGE.name} and the tables differ in: {sorted(set(marks) ^ set(made))}")
    return re.sub(
        r"<!-- (?!end)(.+?) -->\n.*?<!-- end -->",
        lambda match: f"<!-- {match[1]} -->\n\n{made[match[1]]}\n\n<!-- end -->",
        page,
        flags=re.DOTALL,
    )


def draw(runs: list[Run], arms: dict[str, dict[str, Any]], path: Path) -> None:
    """Reward and entropy by step: the mean over seeds, and the range as a band where arms are few."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.9), layout="constrained")
    for axes, key in zip(figure.subplots(1, 2), ("reward", "entropy"), strict=True):
        for number, (label, arm) in enumerate(arms.items()):
            found = [run for run in runs if run.is_of(arm)]
            if not found:
                continue
            at: dict[int, list[float]] = {}
            for line in (line for run in found for line in run.steps if line.get(key) is not None):
                at.setdefault(line["step"], []).append(line[key])
            steps, colour = sorted(at), f"C{number}"
            axes.plot(steps, [mean(at[s]) for s in steps], color=colour, label=f"{label} ({len(found)})")
            if len(arms) <= FEW:
                least, most = ([of(at[s]) for s in steps] for of in (min, max))
                axes.fill_between(steps, least, most, color=colour, alpha=0.1)
        axes.set_title("reward, sampled" if key == "reward" else "entropy, nats a token", fontsize=10)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=7)
    figure.savefig(path, dpi=80)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    PAGE.write_text(filled(PAGE.read_text(), tables()))
    tiny = alike(read_runs(RESULTS / "tiny.jsonl.xz"))
    for name, arms in {"formats": FORMATS, "rates": RATES, "noise": NOISE}.items():
        draw(tiny, arms, IMAGES / f"study_{name}.png")
    draw(read_runs(RESULTS / "gsm8k.jsonl.xz"), five_arms(papers=False), IMAGES / "study_gsm8k.png")


if __name__ == "__main__":
    main()
