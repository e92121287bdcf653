"""Whether an export is the model that was trained: logits of both, and of the base, on a few texts."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qerl.export.trained import TrainedModel
from qerl.generate import encode, load_tokenizer
from qerl.model.adapter import load_adapter
from qerl.model.decoder import Decoder
from qerl.model.loader import load
from qerl.model.packing import pack
from qerl.quant.checkpoint import TOKENIZER_FILES, resolve
from qerl.rl.checkpoint import load_full
from qerl.rl.folder import COMPLETIONS

TEXTS, LONGEST, KEPT = 4, 512, 64  # texts, tokens of each, and positions at their end that are compared
SAMPLES = (
    "A farmer has 17 sheep. All but 9 run away. How many sheep are left? Let us think step by step.",
    "The quick brown fox jumps over the lazy dog, and then it",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Question: What is 12 + 30? Answer:",
)


@dataclass(frozen=True)
class Probe:
    """What the trained model says on the texts, and what the base said."""

    texts: list[list[int]]
    trained_NV: Tensor
    base_NV: Tensor


@dataclass(frozen=True)
class Difference:
    """Between the trained model and its export."""

    positions: int
    largest: float  # difference of logits
    relative: float  # root of the mean squared difference, over that of the logits about their mean
    kl: float  # trained || export, nats a token
    same_token: float  # share of positions with the same likeliest token
    effect_kl: float  # trained || base: what training changed
    lost: float | None  # share of the change of log-probs that the export does not have; None: nothing changed


def probe(trained: TrainedModel, device: str | None, dtype: str | None = None) -> Probe:
    """Loads the base, asks it, attaches what was trained, and asks again."""
    model = load(trained.model, "bf16" if trained.base == "full" else trained.base, device, dtype)
    texts = probe_texts(trained, model.arch.vocab, model.arch.max_positions)
    base_NV = _logits(model, texts)
    if trained.adapter is not None:
        load_adapter(model, trained.adapter)
    else:
        assert trained.weights is not None
        model.train_in_full()
        load_full(model, trained.weights)
    return Probe(texts, _logits(model, texts), base_NV)


def compare_export(
    before: Probe, folder: Path, base: str, adapter: Path | None, device: str | None, dtype: str | None = None
) -> Difference:
    """The folder, loaded as `base` with an adapter if there is one, against what was trained."""
    model = load(str(folder), base, device, dtype, adapter=adapter)
    return difference(before.trained_NV, _logits(model, before.texts), before.base_NV)


def difference(trained_NV: Tensor, export_NV: Tensor, base_NV: Tensor) -> Difference:
    gap_NV = export_NV - trained_NV
    logp, logq, logb = (x.log_softmax(-1) for x in (trained_NV, export_NV, base_NV))
    changed, missing = (logp - logb).square().mean().sqrt(), (logq - logp).square().mean().sqrt()
    spread = (trained_NV - trained_NV.mean(-1, keepdim=True)).square().mean().sqrt()
    return Difference(
        positions=len(trained_NV),
        largest=float(gap_NV.abs().max()),
        relative=float(gap_NV.square().mean().sqrt() / spread),
        kl=_kl(logp, logq),
        same_token=float((trained_NV.argmax(-1) == export_NV.argmax(-1)).double().mean()),
        effect_kl=_kl(logp, logb),
        lost=float(missing / changed) if changed > 0 else None,
    )


def _kl(logp_NV: Tensor, logq_NV: Tensor) -> float:
    return max(0.0, float((logp_NV.exp() * (logp_NV - logq_NV)).sum(-1).mean()))


def probe_texts(trained: TrainedModel, vocab: int, longest: int) -> list[list[int]]:
    """Samples of the run itself where it kept any; else a few sentences; else, without a tokenizer, plain numbers."""
    folder, longest = resolve(trained.model), min(LONGEST, longest)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        generator = torch.Generator().manual_seed(0)
        size = (TEXTS, min(KEPT, longest))
        return [row.tolist() for row in torch.randint(0, vocab, size, generator=generator)]
    tokenizer = load_tokenizer(folder)
    ids = [[*encode(tokenizer, p), *tokenizer(c, add_special_tokens=False)["input_ids"]] for p, c in _samples(trained)]
    return [row[:longest] for row in ids if row]


def _samples(trained: TrainedModel) -> Sequence[tuple[Any, str]]:
    """(prompt, completion) of different prompts, from the last step's table."""
    files = sorted((trained.run / COMPLETIONS).glob("*.parquet")) if trained.run else []
    if not files:
        return [(text, "") for text in SAMPLES[:TEXTS]]
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(files[-1], columns=["prompt", "completion"]).to_pylist()
    found = {row["prompt"]: row["completion"] for row in rows}
    return [(_messages(prompt), completion) for prompt, completion in list(found.items())[:TEXTS]]


def _messages(prompt: str) -> Any:
    """A prompt of messages stands in the table as JSON."""
    try:
        value = json.loads(prompt) if prompt.startswith("[{") else prompt
    except ValueError:
        return prompt
    return value


@torch.no_grad()
def _logits(model: Decoder, texts: list[list[int]]) -> Tensor:
    """At the last positions of each text, float32 on the CPU."""
    packed = pack(texts, model.device)
    hidden = model(packed).split([len(text) for text in texts])
    found = model.logits(torch.cat([part[-KEPT:] for part in hidden])).cpu()
    if not math.isfinite(float(found.sum())):
        raise ValueError("The model's logits are not finite on sample texts: what was trained is broken.")
    return found
