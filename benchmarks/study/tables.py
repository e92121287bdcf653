"""The tables and pictures of docs/study.md from results/: `python benchmarks/study/tables.py`.

A table stands in the page between `<!-- NAME -->` and `<!-- end -->` and is written anew; the words around it are by
hand.
"""

import csv
import re
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from measures import Run, bootstrap, interval, paired, read_lines, read_runs

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
NOISE = {
    "no noise": {"base": "nvfp4", **QUIET},
    "0.01 to 0.0001": {"base": "nvfp4", "noise.schedule": "exponential", "noise.sigma_start": 1e-2, **CORRECTED},
    "0.05 to 0.0005": {"base": "nvfp4", "noise.schedule": "exponential", "noise.sigma_start": 5e-2, **CORRECTED},
    "0.5 to 0.005": STRONG | CORRECTED,
    "0.5 to 0.005, no correction": STRONG | {"correction.form": "off"},
    "by entropy, from 0.01": {"base": "nvfp4", "noise.schedule": "entropy", **CORRECTED},
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
    "NVFP4 + AQN": {"base": "nvfp4", "noise.schedule": "exponential"},
    "NVFP4 + entropy-targeted AQN": {"base": "nvfp4", "noise.schedule": "entropy"},
}
COLLAPSE = 0.1  # reward
PAPERS_RATE = {"bf16 + LoRA": 5e-6}  # others 1e-5

Measure = Callable[[Run], float]


def reward_of_all(run: Run) -> float:
    return run.over_all("reward")


def reward_at_end(run: Run) -> float:
    return run.at_end("reward")


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


def pass_at_8(run: Run) -> float:
    return 100 * float(run.pass8["pass@8"]["value"]) if run.pass8 else float("nan")


def wall_time(run: Run) -> float:
    return sum(float(line["step_time"]) for line in run.steps)


def arms_table(
    runs: list[Run], arms: dict[str, dict[str, Any]], measures: dict[str, tuple[Measure, str]], compared: str = ""
) -> str:
    """A row an arm: the mean over seeds of each measure, and of the one `compared` the difference to the first arm,
    seed by seed, with its 95 % interval."""
    first = next(iter(arms))
    reference = [run for run in runs if run.is_of(arms[first])]
    head = ["", "seeds", *measures, *([f"{compared}: less {first}'s"] if compared else [])]
    rows = []
    for label, arm in arms.items():
        found = [run for run in runs if run.is_of(arm)]
        if not found:
            rows.append([label, "0", "not measured yet", *[""] * (len(head) - 3)])
            continue
        cells = [label, str(len(found)), *(format(mean(map(m, found)), form) for m, form in measures.values())]
        if compared:
            measure, form = measures[compared]
            spread = interval(paired(found, reference, measure)) if label != first else None
            cells.append("" if spread is None else f"{spread[0]:+{form}} ± {spread[1]:{form}}")
        rows.append(cells)
    return markdown(head, rows)


def rates_table(runs: list[Run]) -> str:
    """NVFP4 less bf16, seed by seed, at each learning rate."""
    rows = []
    for rate in LEARNING_RATES:
        four, sixteen = ([run for run in runs if run.is_of(RATES[f"{name}, {rate:g}"])] for name in ("NVFP4", "bf16"))
        cells = [f"{rate:g}", str(len(paired(four, sixteen, reward_at_end)))]
        for measure, form in ((reward_of_all, ".3f"), (reward_at_end, ".3f"), (held_out, ".1f")):
            spread = interval(paired(four, sixteen, measure))
            cells.append("" if spread is None else f"{spread[0]:+{form}} ± {spread[1]:{form}}")
        rows.append(cells)
    return markdown(["learning rate", "seeds", "all steps", "last 5", "held out after, %"], rows)


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


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


def speeds(*by: str, **where: Any) -> dict[tuple[str, ...], dict[str, float]]:
    """Decode tokens/s of each base in benchmarks/results/decode.csv: the last measurement of each combination of `by`
    among the rows that are as `where` says; a function there takes what stands in the row."""
    found: dict[tuple[str, ...], dict[str, float]] = {}
    with open(ROOT / "benchmarks" / "results" / "decode.csv") as file:
        for row in csv.DictReader(file):
            asked = where | {"kv_cache_dtype": "auto"}
            if all(want(row[key]) if callable(want) else row[key] == want for key, want in asked.items()):
                found.setdefault(tuple(row[key] for key in by), {})[row["base"]] = float(row["tokens_per_s"])
    return found


def speed_table(*by: str, **where: Any) -> str:
    """NVFP4 beside bf16, by `by`."""
    found, rows = speeds(*by, rank="32", **where), []
    for key in sorted(found, key=lambda key: [(len(word), word) for word in key]):
        four, sixteen = found[key].get("nvfp4"), found[key].get("bf16")
        cells = [f"{speed:.0f}" if speed else "not measured" for speed in (four, sixteen)]
        rows.append([*key, *cells, f"{four / sixteen:.2f}" if four and sixteen else ""])
    return markdown([*(name.replace("_", " ") for name in by), "NVFP4, tokens/s", "bf16, tokens/s", "ratio"], rows)


def rank_table() -> str:
    """The 7B's speed by rank and batch, and of that without LoRA."""
    found = speeds("batch", "rank", model="qwen2.5-7b", base="nvfp4", timed="5 contexts", new_tokens="256")
    ranks = sorted({int(rank) for _, rank in found} - {0})
    rows = []
    for batch in sorted({batch for batch, _ in found}, key=int):
        by_rank = {rank: found.get((batch, str(rank)), {}).get("nvfp4") for rank in (0, *ranks)}
        share = {
            rank: f" ({speed / by_rank[0]:.2f})" if speed and by_rank[0] else "" for rank, speed in by_rank.items()
        }
        rows.append([batch, *(f"{speed:.0f}{share[rank]}" if speed else "" for rank, speed in by_rank.items())])
    return markdown(["batch", "no LoRA", *(f"r = {rank}" for rank in ranks)], rows)


def large_rank_table() -> str:
    """The larger models' speed by rank, and times bf16's; with up to 256 new tokens, as many as were measured last."""
    ranks, rows = ("16", "32", "64", "128"), []
    found = speeds("model", "batch", "rank", timed="every step", new_tokens=lambda n: int(n) <= 256)
    for model in ("qwen2.5-14b", "qwen2.5-32b"):
        for batch in ("8", "64"):
            cells = []
            for rank in ranks:
                at = found.get((model, batch, rank), {})
                four, sixteen = at.get("nvfp4"), at.get("bf16")
                cells.append((f"{four:.0f}" if four else "") + (f" ({four / sixteen:.2f})" if four and sixteen else ""))
            rows.append([model, batch, *cells])
    return markdown(["model", "batch", *(f"r = {rank}" for rank in ranks)], rows)


def step_table() -> str:
    """Whole RL steps of NVFP4 beside the rivals that were measured at the same commit."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    with open(ROOT / "benchmarks" / "results" / "step.csv") as file:
        for row in csv.DictReader(file):
            key = tuple(row[name] for name in ("shape", "running", "prompts", "group", "new", "commit"))
            found.setdefault(key, {})[row["base"]] = row
    rows = []
    for (shape, running, prompts, group, new, _), bases in found.items():
        rivals = [base for base in ("bf16", "bitsandbytes") if base in bases]
        if "nvfp4" not in bases or not rivals:
            continue
        seconds = {base: float(row["step_s"]) for base, row in bases.items()}
        times = {base: f"{seconds[base]:.2f} s ({seconds[base] / seconds['nvfp4']:.2f})" for base in rivals}
        cells = [f"{seconds['nvfp4']:.2f} s", times.get("bf16", ""), times.get("bitsandbytes", "")]
        memory = " / ".join(f"{float(bases[base]['peak_gb']):.1f}" for base in ("nvfp4", *rivals))
        rows.append([shape, running, f"{int(prompts) * int(group)} x {new}", *cells, memory])
    rows.sort(key=lambda row: [(len(word), word) for word in row[:2]])
    return markdown(
        ["model", "in flight", "completions", "NVFP4", "bf16 (times)", "bitsandbytes NF4 (times)", "GB"], rows
    )


def gsm8k_table(runs: list[Run], papers: bool) -> str:
    """The five arms at one learning rate for all, or at the paper's."""
    if not runs:
        return "Not measured yet; the commands are in [benchmarks/study](../benchmarks/study/README.md)."
    arms = {
        label: arm | {"learning_rate": PAPERS_RATE.get(label, 1e-5) if papers else 1e-4} for label, arm in FIVE.items()
    }
    measures: dict[str, tuple[Measure, str]] = {
        "greedy before, %": (held_out_before, ".1f"),
        "after, %": (held_out, ".1f"),
        "pass@8, %": (pass_at_8, ".1f"),
        "reward, all steps": (reward_of_all, ".3f"),
        "entropy, step 1": (entropy_at_start, ".3f"),
        "last 5": (entropy_at_end, ".3f"),
        "least ESS": (least_sample_size, ".3f"),
        "s of steps": (wall_time, ".0f"),
    }
    return arms_table(runs, arms, measures, "after, %")


def alike(runs: list[Run], *keys: str) -> list[Run]:
    """Those that have the recipe's rank and profile of noise, or what of these is named: tables of other things."""
    recipe = {"lora_r": 16, "noise.profile": "uniform"}
    return [run for run in runs if run.is_of({key: recipe[key] for key in keys or recipe})]


def tables() -> dict[str, str]:
    every = read_runs(RESULTS / "tiny.jsonl.gz")
    tiny, one_rank = alike(every), alike(every, "lora_r")
    gsm8k = read_runs(RESULTS / "gsm8k.jsonl.gz")
    all_steps: dict[str, tuple[Measure, str]] = {"all steps": (reward_of_all, ".3f")}
    rise = all_steps | {"last 5": (reward_at_end, ".3f")}
    after: dict[str, tuple[Measure, str]] = {"held out after, %": (held_out, ".1f")}
    entropy: dict[str, tuple[Measure, str]] = {
        "step 1": (entropy_at_start, ".3f"),
        "all steps": (entropy_of_all, ".3f"),
        "last 5": (entropy_at_end, ".3f"),
    }
    entropy_of: dict[str, tuple[Measure, str]] = {"entropy": (entropy_of_all, ".3f")}
    noise = entropy_of | {
        "least ESS": (least_sample_size, ".3f"),
        "largest weight": (largest_weight, ".1f"),
    }
    return {
        "entropy by format": entropy_table(RESULTS / "entropy_tiny.jsonl.gz"),
        "entropy in training": arms_table(tiny, FORMATS, entropy, "all steps"),
        "reward by format": arms_table(tiny, FORMATS, rise, "all steps"),
        "accuracy by format": arms_table(
            tiny, FORMATS, {"before, %": (held_out_before, ".1f"), "after, %": (held_out, ".1f")}, "after, %"
        ),
        "learning rates": arms_table(
            tiny, RATES, rise | {"best step": (best_reward, ".3f"), "collapsed": (collapsed, ".0%")} | after
        ),
        "learning rates, difference": rates_table(tiny),
        "schedules": arms_table(tiny, SCHEDULES, rise | after, "last 5"),
        "profiles": arms_table(one_rank, PROFILES, rise | noise | after, "last 5"),
        "ranks": arms_table(every, RANKS, rise | entropy_of | after, "last 5"),
        "noise": arms_table(tiny, NOISE, rise | noise | after, "last 5"),
        "noise on bf16": arms_table(tiny, NOISE_ON_BF16, rise | noise | after, "last 5"),
        "speed": speed_table("model", "batch", timed="every step", new_tokens=lambda n: int(n) <= 256),
        "speed by length": speed_table("model", "batch", "new_tokens", new_tokens=lambda n: int(n) > 512),
        "speed by rank": rank_table(),
        "speed by rank, larger models": large_rank_table(),
        "whole steps": step_table(),
        "gsm8k, equal learning rate": gsm8k_table(gsm8k, papers=False),
        "gsm8k, the paper's learning rates": gsm8k_table(gsm8k, papers=True),
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
    """Reward and entropy by step: the mean over seeds, and the range as a band."""
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
            axes.fill_between(steps, [min(at[s]) for s in steps], [max(at[s]) for s in steps], color=colour, alpha=0.1)
        axes.set_title("reward, sampled" if key == "reward" else "entropy, nats a token", fontsize=10)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=7)
    figure.savefig(path, dpi=80)


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text(), tables()))
    tiny = alike(read_runs(RESULTS / "tiny.jsonl.gz"))
    for name, arms in {"formats": FORMATS, "rates": RATES, "noise": NOISE}.items():
        draw(tiny, arms, IMAGES / f"study_{name}.png")


if __name__ == "__main__":
    main()
