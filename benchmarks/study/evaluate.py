"""Every finished LoRA run of a folder on GSM8K's 1319 held-out questions, eight samples each (pass@1, pass@8, maj@8).

`python benchmarks/study/evaluate.py RUNS [--data-dir D] [--limit N]`: as the paper samples, temperature 0.6 and top-p
0.95. The results are RUN/pass8/results.json (with a limit in pass8-first-N, which no table counts); what is complete is
not done again. (Greedy accuracy is in the runs' own metrics: they evaluate on all questions before and after.)
"""

import argparse
import json
from pathlib import Path

import yaml

from qerl.evaluation.job import Job
from qerl.evaluation.run import evaluate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="runs, or folders of them such as a sweep's")
    parser.add_argument("--data-dir", type=Path, help="where the run's own is not there any more")
    parser.add_argument("--limit", type=int, help="only the first questions")
    asked = parser.parse_args()
    adapters = sorted(path for folder in asked.runs for form in ("adapter", "*/adapter") for path in folder.glob(form))
    if not adapters:
        parser.error(
            f"{', '.join(map(str, asked.runs))}: no finished LoRA run is there; it would have an adapter folder."
        )
    for adapter in adapters:
        run = adapter.parent
        config = yaml.safe_load((run / "config.yaml").read_text())
        out = run / ("pass8" if asked.limit is None else f"pass8-first-{asked.limit}")
        if (out / "results.json").exists():
            print(f"{run.name} is done: {out}")  # noqa: T201
            continue
        job = Job(
            model=config["model"],
            tasks=(config["task"],),
            adapter=adapter,
            base=config["base"],
            k=8,
            temperature=0.6,
            top_p=0.95,
            max_tokens=config["max_completion_length"],
            limit=asked.limit,
            system_prompt=config["system_prompt"],
            data_dir=asked.data_dir or (Path(config["data_dir"]) if config["data_dir"] else None),
            out=out,
        )
        scores = evaluate(job)["tasks"][config["task"]]
        print(run.name, json.dumps(scores), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
