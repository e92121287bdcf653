"""AWQ and GPTQ by llm-compressor (extra `calibrate`), which look at calibration text before they round.

The library does the work and writes its own compressed-tensors folder; this file prepares the text, keeps the promise
that OUT appears whole or not at all, and measures the result. The whole model is loaded, unlike in `convert`.
"""

import contextlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qerl.errors import Interrupted
from qerl.quant.checkpoint import TOKENIZER_FILES, Checkpoint
from qerl.quant.convert import REPORT, copy_companions, not_finite
from qerl.quant.layout import Layout, dequantize
from qerl.quant.partial import claimed, complete, require_space, write_json
from qerl.quant.plan import Plan
from qerl.quant.report import LayerError, Report

CHARACTERS_A_TOKEN = 20  # more than any text has: how much of a plain file is read at most
SCHEMES = {"nvfp4": "NVFP4A16", "mxfp4": "MXFP4A16"}


@dataclass(frozen=True)
class CalibrationText:
    file: Path
    num_samples: int
    max_seq_length: int  # tokens


def require(method: str, device: str, file: Path | None) -> None:
    """Refuse, before anything is loaded, what can't work on this machine."""
    if importlib.util.find_spec("llmcompressor") is None:
        raise ValueError(f"Method {method} needs llm-compressor: pip install 'qerl[calibrate]'.")
    if method == "awq" and not device.startswith("cuda"):
        raise ValueError("llm-compressor's AWQ needs a GPU. Use method gptq, mse or rtn on the CPU.")
    if file is None:
        raise ValueError(
            f"Method {method} needs calibration text: --calibration FILE, or quantize.calibration.file=FILE."
        )
    if not file.is_file():
        raise ValueError(f"There is no calibration file {file}. Give JSONL or plain text: --calibration FILE.")


def calibrate(
    source: Checkpoint,
    out: Path,
    layout: Layout,
    plan: Plan,
    method: str,
    device: str,
    text: CalibrationText,
    max_shard_gb: float,
    say: Callable[[str], None],
) -> Report:
    """Quantize `source` with AWQ or GPTQ into the new folder `out`."""
    import transformers

    started = time.monotonic()
    if not any((source.folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(f"{source.folder} has no tokenizer, which method {method} needs. Method mse needs none.")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.folder, trust_remote_code=False)
    samples = read_samples(text, tokenizer)
    _require_finite(source)
    with claimed(out, f"{method} {started}", say) as partial:  # never resumed
        require_space(partial, sum(plan.shard_nbytes(i) for i in range(len(plan.shards))))
        found, asked = sum(map(len, samples)), text.num_samples * text.max_seq_length
        short = "" if found >= asked else f" ({text.file} has no more; {asked} were asked for)"
        say(f"Calibrating {method} on {len(samples)} sequences, {found} tokens{short}.")
        try:
            # llm-compressor writes its log to stdout, which belongs to results.
            with contextlib.redirect_stdout(sys.stderr):
                _oneshot(
                    source.folder, partial, layout, plan, method, device, samples, text.max_seq_length, max_shard_gb
                )
            copy_companions(source.folder, partial)
            with Checkpoint(partial) as result:
                layers = tuple(_layer_errors(source, result, compare=method != "awq"))
                after = result.nbytes
            seconds = time.monotonic() - started
            report = Report(
                str(source.folder), layout.format, method, source.nbytes, after, layers, plan.ignored, seconds
            )
            write_json(partial / REPORT, report.to_json())
            complete(partial, out)
        except (KeyboardInterrupt, OSError) as error:
            reason = f"stopped by an error ({error})" if isinstance(error, OSError) else "interrupted"
            raise Interrupted(f"Quantizing was {reason}. {out} was not made. {partial} can be deleted.") from error
    if method == "awq":
        say("AWQ moves scales from one layer into the next: weight errors against the original do not apply.")
    return report


def _oneshot(
    folder: Path,
    into: Path,
    layout: Layout,
    plan: Plan,
    method: str,
    device: str,
    samples: list[list[int]],
    max_seq_length: int,
    max_shard_gb: float,
) -> None:
    """llm-compressor's part: load, calibrate, save."""
    import transformers
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=plan.dtype, device_map=device)
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
    model.save_pretrained(into, save_compressed=True, max_shard_size=int(max_shard_gb * 1e9))


def _require_finite(source: Checkpoint) -> None:
    for name, where in source.tensors.items():
        if where.spec.dtype.is_floating_point and not bool(torch.isfinite(source.read(name)).all()):
            raise ValueError(not_finite(name))


def read_samples(text: CalibrationText, tokenizer: Any) -> list[list[int]]:
    """Token sequences from a JSONL or text file: all texts one after another, cut to equal lengths."""
    tokens: list[int] = []
    budget = text.num_samples * text.max_seq_length
    try:
        for piece, templated in _texts(text.file, tokenizer, budget):
            # A chat template brings its own special tokens.
            tokens += tokenizer(piece, add_special_tokens=not templated)["input_ids"]
            if tokenizer.eos_token_id is not None:
                tokens.append(tokenizer.eos_token_id)
            if len(tokens) >= budget:
                break
    except UnicodeDecodeError as error:
        raise ValueError(f"{text.file} is not UTF-8 text ({error}).") from error
    if not tokens:
        raise ValueError(f"{text.file} holds no text.")
    length = text.max_seq_length
    cut = [tokens[i : i + length] for i in range(0, min(len(tokens), budget), length)]
    return cut[:-1] if len(cut) > 1 and len(cut[-1]) < length else cut


def _texts(file: Path, tokenizer: Any, budget: int) -> Iterator[tuple[str, bool]]:
    """Each text, and whether a chat template made it."""
    if file.suffix not in (".jsonl", ".json"):
        with open(file, encoding="utf-8") as plain:
            yield plain.read(CHARACTERS_A_TOKEN * budget), False
        return
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{file}, line {number}, is not JSON: {error}.") from error
            fields = row if isinstance(row, dict) else {}
            value = next((fields[key] for key in ("text", "messages", "prompt") if key in fields), None)
            if isinstance(value, str):
                yield value, False
            elif isinstance(value, list):
                yield tokenizer.apply_chat_template(value, tokenize=False), True
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
