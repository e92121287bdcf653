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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from qerl.model.architecture import PROJECTIONS
from qerl.model.decoder import Decoder
from qerl.model.layers import Block, Lora, Projection, RMSNorm
from qerl.quant.partial import require_new

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # PEFT's, in front of the base model's own names
NORMS = ("input_layernorm", "post_attention_layernorm")
# PEFT features that change the arithmetic and that this decoder lacks, with the value that means "not used".
UNSUPPORTED = {
    "use_dora": False, "use_qalora": False, "lora_bias": False, "fan_in_fan_out": False, "bias": "none",
    "rank_pattern": {}, "alpha_pattern": {}, "layers_to_transform": None, "layer_replication": None,
    "target_parameters": None, "trainable_token_indices": None, "alora_invocation_tokens": None,
    "megatron_config": None, "arrow_config": None,
}  # fmt: skip


@dataclass(frozen=True)
class LoraSettings:
    """What an adapter is made of; names as in PEFT's LoraConfig."""

    r: int = 32
    lora_alpha: float = 64
    target_modules: tuple[str, ...] | str = PROJECTIONS  # names or endings of names; a regular expression; "all-linear"
    use_rslora: bool = False
    train_norms: bool = False  # the two norms of every block as well

    @property
    def scale(self) -> float:
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


def add_lora(model: Decoder, settings: LoraSettings, seed: int = 0) -> None:
    """Attach fresh LoRA, initialised as PEFT does: A uniform in +-1/sqrt(K), B zero, so that nothing changes yet."""
    if settings.r < 1:
        raise ValueError(f"LoRA needs a rank of at least 1, not {settings.r}.")
    if any(projection.lora for _, projection, _ in _projections(model)):
        raise ValueError("The model has an adapter already.")
    if model.embedding.trained is not None:
        raise ValueError("Full training and LoRA exclude each other.")
    chosen = _match(settings.target_modules, [name for name, _, _ in _projections(model)])
    generator = torch.Generator().manual_seed(seed)
    for name, projection, part in _projections(model):
        if name in chosen:
            inputs, outputs = model.arch.inputs(part), model.arch.outputs(part)
            a_RK = (torch.rand(settings.r, inputs, generator=generator) * 2 - 1) / math.sqrt(inputs)
            b_NR = torch.zeros(outputs, settings.r)
            projection.lora[part] = Lora(a_RK.to(model.device), b_NR.to(model.device), settings.scale, model.dtype)
    if settings.train_norms:
        for _, norm in _norms(model):
            norm.train_gain()


def trained_parameters(model: Decoder) -> dict[str, nn.Parameter]:
    """Everything trained, float32, by name; what an optimizer takes."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def save_adapter(model: Decoder, folder: Path, settings: LoraSettings, base_model: str = "") -> None:
    """Write PEFT's folder, through a temporary one beside it."""
    require_new(folder)
    tensors = {f"{PREFIX}{name}": tensor.detach().contiguous().cpu() for name, tensor, _ in _tensors(model)}
    if not tensors:
        raise ValueError("The model has no adapter to save.")
    targets = sorted({name for name, projection, part in _projections(model) if part in projection.lora})
    endings = sorted({name.rpartition(".")[2] for name in targets})
    all_with_endings = [name for name, _, part in _projections(model) if part in endings]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
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
    if not path.is_file():
        raise ValueError(f"{folder} has no {CONFIG}: it is not a PEFT adapter folder.")
    config = json.loads(path.read_text())
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{folder} is a {config.get('peft_type')} adapter; only LORA is supported.")
    used = [key for key, off in UNSUPPORTED.items() if config.get(key) is not None and config[key] != off]
    if isinstance(init := config.get("init_lora_weights"), str) and init != "gaussian":
        used.append(f"init_lora_weights={init}")
    extra = sorted(set(config.get("modules_to_save") or ()) - set(NORMS))
    used += [f"modules_to_save={name}" for name in extra]
    if used:
        raise ValueError(f"{folder} uses {', '.join(used)}, which qerl does not support.")
    targets = config["target_modules"]
    return LoraSettings(
        r=config["r"],
        lora_alpha=config["lora_alpha"],
        target_modules=targets if isinstance(targets, str) else tuple(targets),
        use_rslora=bool(config.get("use_rslora")),
        train_norms=bool(config.get("modules_to_save")),
    )


def load_adapter(model: Decoder, folder: Path) -> LoraSettings:
    """Attach a PEFT adapter, or write its values into the one that is there if they are of the same shape."""
    settings = read_settings(folder)
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"{folder} has no {WEIGHTS}.")
    stored = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    if not any(projection.lora for _, projection, _ in _projections(model)):
        add_lora(model, settings)
    places = {name: write for name, _, write in _tensors(model)}
    if stored.keys() != places.keys():
        odd = sorted(stored.keys() ^ places.keys())
        raise ValueError(f"{folder} does not fit this model: {len(odd)} tensors on one side only, such as {odd[0]}.")
    for name, write in places.items():
        write(stored[name])
    return settings


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


def _match(targets: tuple[str, ...] | str, names: list[str]) -> set[str]:
    """PEFT's rule: a list holds names or endings of names, a string is a regular expression for the whole name."""
    existing = f"The model has {', '.join(PROJECTIONS)} (full names such as {names[0]})."
    if targets == "all-linear":
        return set(names)
    if isinstance(targets, str):
        found = {name for name in names if re.fullmatch(targets, name)}
        if not found:
            raise ValueError(f"LoRA targets {targets!r} match nothing. {existing}")
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
