"""LoRA on any of the seven projections, optionally the blocks' two norms, and PEFT's files of both.

A and B belong to single projections, also where the projections are fused, so that PEFT folders round-trip. Adapters
are loaded in place: addresses do not change when an adapter of the same shape is already there.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from qerl.model.architecture import PROJECTIONS
from qerl.model.decoder import Decoder
from qerl.model.layers import Block, Lora, LoraSettings, Projection, RMSNorm
from qerl.model.slow_layers import warn_of_slow_lora
from qerl.quant.partial import require_new

HARMLESS_INITS = ("gaussian", "eva", "orthogonal")  # others change the base weights as well
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # PEFT's, in front of the base model's own names
NORMS = ("input_layernorm", "post_attention_layernorm")
# Fields of PEFT's configuration that say nothing about the arithmetic, or that are read here. Any other field that is
# set is a feature that would be lost in silence.
KNOWN = {
    "peft_type", "task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version",
    "r", "lora_alpha", "use_rslora", "target_modules", "modules_to_save", "lora_dropout", "init_lora_weights",
    "layers_pattern", "megatron_core", "qalora_group_size", "runtime_config", "loftq_config", "eva_config",
    "corda_config", "lora_ga_config", "ensure_weight_tying",
}  # fmt: skip


def add_lora(model: Decoder, settings: LoraSettings, seed: int = 0) -> None:
    """Attach fresh LoRA, initialised as PEFT does: A uniform in +-1/sqrt(K), B zero, so that nothing changes yet."""
    if settings.r < 1:
        raise ValueError(f"LoRA needs a rank of at least 1, not {settings.r}.")
    if settings.lora_alpha <= 0:
        raise ValueError(f"LoRA needs a lora_alpha above 0, not {settings.lora_alpha}.")
    if model.lora is not None:
        raise ValueError("The model has an adapter already; load the model anew for another one.")
    if model.embedding.trained is not None:
        raise ValueError("Full training and LoRA exclude each other: load the model anew for LoRA.")
    chosen = match_targets(settings.target_modules, [name for name, _, _ in _projections(model)])
    generator = torch.Generator().manual_seed(seed)
    for name, projection, part in _projections(model):
        if name in chosen:
            inputs, outputs = model.arch.inputs(part), model.arch.outputs(part)
            uniform = torch.rand(settings.r, inputs, generator=generator, dtype=torch.float32) * 2 - 1
            a_RK = (uniform / math.sqrt(inputs)).to(model.device)
            b_NR = torch.zeros(outputs, settings.r, dtype=torch.float32, device=model.device)
            projection.lora[part] = Lora(a_RK, b_NR, settings.scale, model.dtype)
    if settings.train_norms:
        for _, norm in _norms(model):
            norm.train_gain()
    if model.device.type == "cuda" and model.dtype == torch.bfloat16:
        for module in model.modules():
            if isinstance(module, Projection):
                module.lay_out_lora(model.dtype)
        warn_of_slow_lora(model)
    model.lora = settings


def trained_parameters(model: Decoder) -> dict[str, nn.Parameter]:
    """Everything trained, float32, by name; what an optimizer takes."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def save_adapter(model: Decoder, folder: Path | str, base_model: str = "") -> None:
    """Write PEFT's folder, through a temporary one beside it. base_model: its name, by default what was loaded."""
    folder = Path(folder)
    require_new(folder)
    settings = model.lora
    if settings is None:
        raise ValueError("The model has no adapter to save: add_lora or load_adapter comes first.")
    tensors = {f"{PREFIX}{name}": tensor.detach().contiguous().cpu() for name, tensor, _ in _tensors(model)}
    targets = sorted({name for name, projection, part in _projections(model) if part in projection.lora})
    endings = sorted({name.rpartition(".")[2] for name in targets})
    all_with_endings = [name for name, _, part in _projections(model) if part in endings]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model or model.source,
        "inference_mode": True,
        "r": settings.r,
        "lora_alpha": settings.lora_alpha,
        "lora_dropout": 0.0,
        "use_rslora": settings.use_rslora,
        "target_modules": endings if len(all_with_endings) == len(targets) else targets,
        "modules_to_save": list(NORMS) if settings.train_norms else None,
        "bias": "none",
    }
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
    (partial / CONFIG).write_text(json.dumps(config, indent=2))
    os.replace(partial, folder)


def read_settings(folder: Path) -> LoraSettings:
    """A PEFT folder's settings; features that would be silently lost are refused by name."""
    path = folder / CONFIG
    if not folder.is_dir():
        raise ValueError(f"There is no folder {folder}. An adapter is RUN/adapter, RUN/checkpoints/step-N/adapter, ...")
    if not path.is_file():
        inside = f" Did you mean {folder / 'adapter'}?" if (folder / "adapter" / CONFIG).is_file() else ""
        raise ValueError(f"{folder} has no {CONFIG}: it is not a PEFT adapter folder.{inside}")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise ValueError(f"{folder} is a {kind} adapter; only LORA is supported.")
    if missing := [key for key in ("r", "lora_alpha", "target_modules") if not config.get(key)]:
        raise ValueError(f"{path} has no {', '.join(missing)}, without which LoRA can't be attached.")
    used = [key for key, value in config.items() if key not in KNOWN and value and value != "none"]
    if isinstance(init := config.get("init_lora_weights"), str) and init not in HARMLESS_INITS:
        used.append(f"init_lora_weights={init}")
    saved = set(config.get("modules_to_save") or ())
    used += [f"modules_to_save={name}" for name in sorted(saved - set(NORMS))]
    if used:
        raise ValueError(f"{folder} uses {', '.join(used)}, which qerl does not support.")
    if saved and saved != set(NORMS):
        raise ValueError(
            f"{folder} trains only one of the norms {' and '.join(NORMS)} (modules_to_save); both or none."
        )
    targets = config["target_modules"]
    return LoraSettings(
        r=config["r"],
        lora_alpha=config["lora_alpha"],
        target_modules=targets if isinstance(targets, str) else tuple(targets),
        use_rslora=bool(config.get("use_rslora")),
        train_norms=bool(saved),
    )


def load_adapter(model: Decoder, folder: Path | str) -> LoraSettings:
    """Attach a PEFT adapter, or write its values in place into one of the same shape and scale. All or nothing."""
    folder = Path(folder)
    settings = read_settings(folder)
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"{folder} has no {WEIGHTS}.")
    try:
        stored = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    except SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS} is damaged: {error}.") from error
    shapes = _expected(model, settings)
    if stored.keys() != shapes.keys():
        odd = sorted(stored.keys() ^ shapes.keys())
        raise ValueError(
            f"{folder} does not fit this model: {len(odd)} tensors on one side only, such as {odd[0]}. "
            + _models(model, folder)
        )
    for name, shape in shapes.items():
        if (found := tuple(stored[name].shape)) != shape:
            raise ValueError(
                f"{folder} does not fit this model: {name} has shape {found}, not {shape}. {_models(model, folder)}"
            )
    if model.lora is None:
        add_lora(model, settings)
    elif {name: tuple(tensor.shape) for name, tensor, _ in _tensors(model)} != shapes:
        raise ValueError(f"{folder} does not fit the adapter that the model has; load the model anew for this one.")
    elif model.lora.scale != settings.scale:
        raise ValueError(
            f"{folder} scales its LoRA by {settings.scale:g} (lora_alpha, r, use_rslora), the model's adapter by "
            f"{model.lora.scale:g}; load the model anew for this one."
        )
    for name, _, write in _tensors(model):
        write(stored[name])
    return settings


def _models(model: Decoder, folder: Path) -> str:
    named = json.loads((folder / CONFIG).read_text()).get("base_model_name_or_path")
    return f"It was made for {named or 'a model that it does not name'}; this is {model.source}."


def _expected(model: Decoder, settings: LoraSettings) -> dict[str, tuple[int, ...]]:
    """The tensors that an adapter of these settings has for this model."""
    chosen = match_targets(settings.target_modules, [name for name, _, _ in _projections(model)])
    shapes: dict[str, tuple[int, ...]] = {}
    for name, _, part in _projections(model):
        if name in chosen:
            shapes[f"{name}.lora_A.weight"] = (settings.r, model.arch.inputs(part))
            shapes[f"{name}.lora_B.weight"] = (model.arch.outputs(part), settings.r)
    if settings.train_norms:
        shapes |= {f"{name}.weight": (model.arch.hidden,) for name, _ in _norms(model)}
    return shapes


def _projections(model: Decoder) -> Iterator[tuple[str, Projection, str]]:
    """(transformers' name, the projection that holds it, its part there) of every linear layer."""
    for i, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        for at, projections in (
            ("self_attn", (block.attention.qkv, block.attention.o)),
            ("mlp", (block.mlp.gate_up, block.mlp.down)),
        ):
            for projection in projections:
                for part in projection.parts:
                    yield f"model.layers.{i}.{at}.{part}", projection, part


def _norms(model: Decoder) -> Iterator[tuple[str, RMSNorm]]:
    for i, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        for name, norm in zip(NORMS, (block.input_norm, block.post_attention_norm), strict=True):
            yield f"model.layers.{i}.{name}", norm


def _tensors(model: Decoder) -> Iterator[tuple[str, Tensor, Any]]:
    """(name in PEFT's file, value, function that writes a new value in place) of everything an adapter holds."""
    for name, projection, part in _projections(model):
        if part in projection.lora:
            lora = projection.lora[part]
            assert isinstance(lora, Lora)
            yield f"{name}.lora_A.weight", lora.a.master, lora.a.write
            yield f"{name}.lora_B.weight", lora.b.master, lora.b.write
    for name, norm in _norms(model):
        if norm.trained is not None:
            yield f"{name}.weight", norm.trained, norm.trained.data.copy_


def match_targets(targets: tuple[str, ...] | str, names: list[str]) -> set[str]:
    """PEFT's rule: a list holds names or endings of names, a string is a regular expression for the whole name."""
    existing = f"The model has {', '.join(PROJECTIONS)} (full names such as {names[0]})."
    if targets == "all-linear":
        return set(names)
    if isinstance(targets, str):
        try:
            found = {name for name in names if re.fullmatch(targets, name)}
        except re.error as error:
            raise ValueError(f"LoRA targets {targets!r} are not a regular expression: {error}.") from error
        if not found:
            endings = f"[{', '.join(part.strip() for part in targets.split(','))}]"
            hint = f"A string is a regular expression for the whole name; endings of names are a list: {endings}."
            raise ValueError(f"LoRA targets {targets!r} match nothing. {hint} {existing}")
        return found
    matched: set[str] = set()
    for target in targets:
        found = {name for name in names if name == target or name.endswith(f".{target}")}
        if not found:
            raise ValueError(f"LoRA target {target!r} matches nothing. {existing}")
        matched |= found
    if not matched:
        raise ValueError(f"No LoRA targets were given. {existing}")
    return matched
