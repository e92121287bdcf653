"""SmolLM2-135M-Instruct learns one- and two-digit sums by RL: `python benchmarks/smollm2_sums.py MODEL OUT [key=value
...]`.

MODEL is a checkpoint folder or hub id. A Ctrl-C saves and ends; what was measured is in OUT/metrics.jsonl.
"""

import random
import re
import sys

import qerl
from qerl.recipe import load_config

PLAN = (
    "base=nvfp4 prompts_per_step=32 num_generations=8 max_prompt_length=64 max_completion_length=48 learning_rate=2e-4 "
    "lr_scheduler_type=constant warmup_steps=5 max_grad_norm=1.0 weight_decay=0 lora_r=32 lora_alpha=64 "
    "epsilon_high=0.28 eval_steps=25 eval_size=400 save_steps=100 max_steps=300"
)


def sums(split: str) -> list[dict[str, object]]:
    """All sums of two numbers below 100, a tenth of them held out."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(0).shuffle(pairs)
    chosen = pairs[:1000] if split == "test" else pairs[1000:]
    return [
        {"prompt": [{"role": "user", "content": f"What is {a} + {b}? Answer with the number."}], "answer": str(a + b)}
        for a, b in chosen
    ]


def accuracy(completions: list[list[dict[str, str]]], answer: list[str], **kwargs: object) -> list[float]:
    """Whether the last number of a completion is the sum."""
    found = [re.findall(r"\d+", completion[0]["content"]) for completion in completions]
    return [float(bool(numbers) and numbers[-1] == right) for numbers, right in zip(found, answer, strict=True)]


if __name__ == "__main__":
    model, out, *words = sys.argv[1:]
    config = load_config(None, [f"model={model}", f"output_dir={out}", *PLAN.split(), *words])
    result = qerl.train(config, reward_funcs=accuracy, train_dataset=sums("train"), eval_dataset=sums("test"))
    print(result.summary())  # noqa: T201
