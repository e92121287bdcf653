"""AWQ and GPTQ by llm-compressor (extra `calibrate`), which look at calibration text before they round.

The library does the work and writes its own compressed-tensors folder; this file prepares the text, keeps the promise
that OUT appears whole or not at all, and measures the result. The whole model is loaded, unlike in `convert`.
"""

import importlib.util
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from qerl.quant.checkpoint import Checkpoint
from qerl.quant.convert import REPORT, copy_companions, partial_folder
from qerl.quant.layout import Layout, dequantize
from qerl.quant.plan import Plan
from qerl.quant.report import LayerError, Report

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
SCHEMES = {"nvfp4": "NVFP4A16", "mxfp4": "MXFP4A16"}


def require(method: str, device: str, file: Path | None) -> None:
    """Refuse, before anything is loaded, what can't work on this machine."""
    if importlib.util.find_spec("llmcompressor") is None:
        raise ValueError(f"Method {method} needs llm-compressor: pip install 'qerl[calibrate]'.")
    if method == "awq" and not device.startswith("cuda"):
        raise ValueError("llm-compressor's AWQ needs a GPU. Use method gptq, mse or rtn on the CPU.")
    if file is None or not file.is_file():
        raise ValueError(f"There is no calibration file {file}. Give JSONL or plain text: --calibration FILE.")


def calibrate(
    source: Checkpoint,
    out: Path,
    layout: Layout,
    plan: Plan,
    method: str,
    device: str,
    file: Path,
    num_samples: int,
    max_seq_length: int,
    max_shard_gb: float,
    say: Callable[[str], None],
) -> Report:
    """Quantize `source` with AWQ or GPTQ into the new folder `out`."""
    import transformers
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    started = time.monotonic()
    if not any((source.folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(f"{source.folder} has no tokenizer, which method {method} needs. Method mse needs none.")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.folder, trust_remote_code=False)
    samples = read_samples(file, tokenizer, num_samples, max_seq_length)
    say(f"Calibrating {method} on {len(samples)} sequences, {sum(map(len, samples))} tokens.")
    model = transformers.AutoModelForCausalLM.from_pretrained(source.folder, dtype=plan.dtype, device_map=device)
    target: dict[str, Any] = {
        "targets": ["Linear"],
        "scheme": SCHEMES[layout.format],
        "ignore": list(plan.ignored) or ["lm_head"],
    }
    recipe = [GPTQModifier(**target)] if method == "gptq" else [AWQModifier(), QuantizationModifier(**target)]
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in samples]
    oneshot(
        model=model,
        dataset=Dataset.from_list(rows),
        recipe=recipe,
        num_calibration_samples=len(rows),
        max_seq_length=max_seq_length,
    )
    partial = partial_folder(out)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model.save_pretrained(partial, save_compressed=True, max_shard_size=f"{int(max_shard_gb * 1000)}MB")
    copy_companions(source.folder, partial)
    with Checkpoint(partial) as result:
        layers = tuple(_layer_errors(source, result, compare=method != "awq"))
        after = result.nbytes
    if method == "awq":
        say("AWQ moves scales from one layer into the next: weight errors against the original do not apply.")
    report = Report(
        str(source.folder),
        layout.format,
        method,
        source.nbytes,
        after,
        layers,
        plan.ignored,
        time.monotonic() - started,
    )
    (partial / REPORT).write_text(json.dumps(report.to_json(), indent=2))
    os.replace(partial, out)
    return report


def read_samples(file: Path, tokenizer: Any, num_samples: int, max_seq_length: int) -> list[list[int]]:
    """Token sequences from a JSONL or text file: all texts one after another, cut to equal lengths."""
    tokens: list[int] = []
    budget = num_samples * max_seq_length
    for text in _texts(file, tokenizer):
        tokens += tokenizer(text)["input_ids"]
        if tokenizer.eos_token_id is not None:
            tokens.append(tokenizer.eos_token_id)
        if len(tokens) >= budget:
            break
    if not tokens:
        raise ValueError(f"{file} holds no text.")
    cut = [tokens[i : i + max_seq_length] for i in range(0, min(len(tokens), budget), max_seq_length)]
    return cut[:-1] if len(cut) > 1 and len(cut[-1]) < max_seq_length else cut


def _texts(file: Path, tokenizer: Any) -> Iterator[str]:
    if file.suffix not in (".jsonl", ".json"):
        yield file.read_text(encoding="utf-8")
        return
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{file}, line {number}, is not JSON: {error}.") from error
            value = next(
                (row[key] for key in ("text", "messages", "prompt") if isinstance(row, dict) and key in row), None
            )
            if isinstance(value, str):
                yield value
            elif isinstance(value, list):
                yield tokenizer.apply_chat_template(value, tokenize=False)
            else:
                raise ValueError(f"{file}, line {number}, has none of the fields text, messages, prompt.")


def _layer_errors(source: Checkpoint, result: Checkpoint, compare: bool) -> Iterator[LayerError]:
    for module in result.quantized_modules:
        before = source.read(f"{module}.weight").to(torch.float32)
        stored = sum(w.spec.nbytes for name, w in result.tensors.items() if name.startswith(f"{module}.weight"))
        error = None
        if compare:
            error = float((dequantize(result.read_quantized(module)) - before).square().sum())
        yield LayerError(module, before.numel(), stored, error, float(before.square().sum()))
