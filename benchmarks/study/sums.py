"""Sums of two numbers below 100 in GSM8K's form, a tenth held out: `python benchmarks/study/sums.py FOLDER`.

FOLDER is then the data_dir of benchmarks/study/sums.yaml: its gsm8k_train.jsonl and gsm8k_test.jsonl are these sums.
"""

import argparse
import json
import random
from pathlib import Path

HELD_OUT = 1000


def write_sums(folder: Path) -> None:
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(0).shuffle(pairs)
    folder.mkdir(parents=True, exist_ok=True)
    for name, chosen in {"test": pairs[:HELD_OUT], "train": pairs[HELD_OUT:]}.items():
        rows = (
            {"question": f"What is {a} + {b}? Answer with the number.", "answer": f"#### {a + b}"} for a, b in chosen
        )
        (folder / f"gsm8k_{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    write_sums(folder)
    print(f"{folder}: gsm8k_train.jsonl and gsm8k_test.jsonl, {HELD_OUT} held out")  # noqa: T201


if __name__ == "__main__":
    main()
