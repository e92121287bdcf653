"""Speed and memory in docs/study.md: what `qerl bench` measured (benchmarks/results), and what the plan says."""

import csv
from pathlib import Path
from typing import Any

from measures import markdown

from qerl.model.shapes import shape_named
from qerl.recipe import build_config
from qerl.rl.footprint import footprint
from qerl.rl.plan import workload

MEASURED = Path(__file__).parents[1] / "results"
GB = 1e9


def speeds(*by: str, **where: Any) -> dict[tuple[str, ...], dict[str, float]]:
    """Decode tokens/s of each base in benchmarks/results/decode.csv: the last measurement of each combination of `by`
    among the rows that are as `where` says; a function there takes what stands in the row."""
    found: dict[tuple[str, ...], dict[str, float]] = {}
    with open(MEASURED / "decode.csv") as file:
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
    with open(MEASURED / "step.csv") as file:
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


def memory_table() -> str:
    """By the plan: weights, and torch's peak while the model is updated with every block recomputed."""
    bases = {"NVFP4": "nvfp4", "NF4": "nf4", "bf16": "bf16", "full": "full"}
    settings = {"max_prompt_length": 256, "max_completion_length": 1024, "num_generations": 8, "recompute": "all"}
    settings |= {"micro_batch_tokens": 4096, "lora_r": 32, "eval_size": 0}
    rows = []
    for name in ("qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b"):
        shape, cells = shape_named(name), []
        for base in bases.values():
            parts = footprint(shape, workload(build_config(settings | {"base": base}), shape, 10**15))
            cells.append(f"{parts.weights / GB:.1f} / {parts.update_peak / GB:.1f}")
        rows.append([name, *cells])
    return markdown(["model", *(f"{name}, GB" for name in bases)], rows)
