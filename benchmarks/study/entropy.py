"""Entropy of a model before any training, by format: `python benchmarks/study/entropy.py OUT.jsonl.xz [--model M] ...`.

Every format answers the same held-out prompts at temperature 1. Two entropies a prompt, in nats a token: `own`, along
what the format itself sampled (what training logs), and `same`, along what the 16-bit weights sampled, so that formats
differ by their distributions alone. Besides the formats there is a sham, the 16-bit weights plus Gaussian noise as
large, matrix by matrix, as NVFP4's rounding error, in several draws: is a rise the format's, or that of any noise? Last
comes NVFP4 with AQN's noise on the norms' gains, in as many draws of each sigma.
"""

import argparse
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
from measures import write_lines

from qerl.generate import encode, engine_for, load_tokenizer, stop_ids
from qerl.model.decoder import Decoder
from qerl.model.layers import DenseWeight, QuantizedWeight
from qerl.model.loader import load
from qerl.model.noise import set_noise
from qerl.model.packing import next_tokens, pack
from qerl.quant.checkpoint import resolve
from qerl.records import Completion, Request, Sampling
from qerl.tasks.task import load_task

FORMATS = {"bf16": ("bf16", "mse"), "nvfp4": ("nvfp4", "mse"), "nvfp4 rtn": ("nvfp4", "rtn")}
FORMATS |= {"mxfp4": ("mxfp4", "mse"), "nf4": ("nf4", "mse")}
AT_ONCE = 8192  # tokens of a forward pass


def shams(model: str, device: str, draws: int) -> Iterator[tuple[str, Decoder]]:
    """The 16-bit model with noise of the size of NVFP4's error on every matrix that NVFP4 rounds."""
    rounded = dict(load(model, "nvfp4", device).named_modules())
    for draw in range(draws):
        shaken, generator = load(model, "bf16", device), torch.Generator().manual_seed(draw)
        for name, module in shaken.named_modules():
            other = rounded.get(name)
            if isinstance(module, DenseWeight) and isinstance(other, QuantizedWeight):
                value = module.read()
                error = (other.dequantized(value.dtype).float() - value.float()).square().mean().sqrt()
                value += (torch.randn(value.shape, generator=generator).to(value.device) * error).to(value.dtype)
        yield f"sham, {draw}", shaken


def noisy(model: str, device: str, sigmas: list[float], draws: int) -> Iterator[tuple[str, Decoder]]:
    for sigma in sigmas:
        for draw in range(draws):
            base = load(model, "nvfp4", device)
            set_noise(base, sigma, torch.Generator().manual_seed(draw))
            yield f"AQN {sigma:g}, {draw}", base


def entropies(model: Decoder, prompts: list[tuple[int, ...]], samples: list[Completion]) -> list[tuple[float, int]]:
    """Of each prompt's sampled tokens: the sum of their entropies, with the model's noise, and how many they are."""
    sums, counts = [0.0] * len(prompts), [0] * len(prompts)
    step = max(1, AT_ONCE // max(len(prompts[s.request]) + len(s.token_ids) for s in samples))
    for start in range(0, len(samples), step):
        part = samples[start : start + step]
        packed = pack([[*prompts[s.request], *s.token_ids] for s in part], model.device)
        with torch.no_grad():
            hidden = model(packed, noise=True)
            places, targets = next_tokens(packed)
            entropy = model.logprobs(hidden[places], targets)[1].tolist()
        at = 0
        for sample in part:
            length = len(prompts[sample.request]) + len(sample.token_ids) - 1
            own = entropy[at + length - len(sample.token_ids) : at + length]
            sums[sample.request] += sum(own)
            counts[sample.request] += len(own)
            at += length
    return list(zip(sums, counts, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="compressed JSON Lines (.jsonl.xz), one a format and prompt")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--task", default="arithmetic")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=72)
    parser.add_argument("--draws", type=int, default=5, help="of the sham, and of each sigma")
    parser.add_argument("--sigmas", type=float, nargs="*", default=[1e-2, 5e-2, 5e-1], help="of AQN's noise")
    asked = parser.parse_args()
    if min(asked.prompts, asked.samples, asked.max_tokens, asked.draws) < 1:
        parser.error("--prompts, --samples, --max-tokens and --draws must be at least 1.")
    if not asked.out.parent.is_dir():
        parser.error(f"There is no folder {asked.out.parent}.")

    folder = resolve(asked.model)
    tokenizer = load_tokenizer(folder)
    rows = load_task(asked.task, data_dir=asked.data_dir, eval_size=asked.prompts).test[: asked.prompts]
    prompts = [encode(tokenizer, row["prompt"]) for row in rows]
    requests = [Request(id=i, prompt_ids=ids, samples=asked.samples) for i, ids in enumerate(prompts)]
    sampling = Sampling(max_tokens=asked.max_tokens, stop_ids=stop_ids(folder, tokenizer), seed=0, noise=True)
    place = (asked.model, asked.device)
    models = chain(
        ((name, load(asked.model, base, asked.device, method=method)) for name, (base, method) in FORMATS.items()),
        shams(*place, asked.draws),
        noisy(*place, asked.sigmas, asked.draws),
    )
    lengths = [len(ids) for ids in prompts for _ in range(asked.samples)]
    reference: list[Completion] = []
    lines = []
    for name, model in models:
        samples = engine_for(model, tokenizer, lengths, asked.max_tokens).generate(requests, sampling)
        reference = reference or samples  # of bf16, which comes first
        own, same = (entropies(model, prompts, drawn) for drawn in (samples, reference))
        for i in range(len(prompts)):
            line = {"format": name, "prompt": i, "own": own[i][0] / own[i][1], "own_tokens": own[i][1]}
            lines.append(line | {"same": same[i][0] / same[i][1], "same_tokens": same[i][1]})
        total = [sum(s for s, _ in x) / sum(n for _, n in x) for x in (own, same)]
        print(f"{name:12} own {total[0]:.4f}  same {total[1]:.4f}", flush=True)  # noqa: T201
    write_lines(asked.out, lines)


if __name__ == "__main__":
    main()
