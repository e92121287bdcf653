"""What a conversion will do, decided before any weight is read: which tensors are quantized together, which are copied,
and in which shard of the output each result lies. Everything that can be refused is refused here."""

import fnmatch
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from qerl.quant.checkpoint import Checkpoint
from qerl.quant.layout import Layout
from qerl.quant.safetensors_io import Spec

# Layers that serving engines fuse into one matrix, and which therefore share a global scale.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
WIDE = (torch.float32, torch.float64)
QUANTIZABLE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Unit:
    """The smallest piece of work: modules that share a global scale, or one tensor to copy (`modules` empty)."""

    modules: tuple[str, ...]
    copied: str
    outputs: dict[str, Spec]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.outputs.values())


@dataclass(frozen=True)
class Plan:
    shards: tuple[tuple[Unit, ...], ...]
    ignored: tuple[str, ...]  # linear modules that stay in 16 bits
    dtype: torch.dtype  # of the tensors that stay in 16 bits

    def shard_name(self, i: int) -> str:
        return f"model-{i + 1:05d}-of-{len(self.shards):05d}.safetensors"

    def shard_nbytes(self, i: int) -> int:
        return sum(unit.nbytes for unit in self.shards[i])


def make_plan(source: Checkpoint, layout: Layout, ignore: tuple[str, ...], max_shard_bytes: int) -> Plan:
    """Refuses, with the remedy, whatever can't be converted."""
    if "quantization_config" in source.config:
        method = source.config["quantization_config"].get("quant_method", "an unknown method")
        raise ValueError(f"{source.folder} is already quantized ({method}). Start from the 16-bit model.")
    linear, head = linear_modules(source.folder)
    architecture = ", ".join(source.config.get("architectures") or [source.config.get("model_type", "?")])
    body = [name for name in linear if name != head]
    if not body:
        raise ValueError(f"{architecture} has no linear layers besides its head: there is nothing to quantize.")
    missing = [name for name in body if f"{name}.weight" not in source.tensors]
    if missing:
        raise ValueError(
            f"{source.folder} lacks {len(missing)} of the {len(body)} linear weights of {architecture}, such as "
            f"{missing[0]}.weight: config.json and weights do not belong together, or a shard is missing."
        )
    ignored = _match(ignore, body)
    chosen = [name for name in body if name not in ignored]
    if not chosen:
        raise ValueError("--ignore covers every linear layer: there is nothing left to quantize.")
    for name in chosen:
        spec = source.tensors[f"{name}.weight"].spec
        if spec.dtype not in QUANTIZABLE:
            raise ValueError(
                f"{name}.weight is {spec.dtype}: the model is already quantized. Start from 16-bit weights."
            )
        if spec.shape[-1] % layout.block:
            raise ValueError(
                f"{name} has {spec.shape[-1]} inputs, which {layout.format}'s blocks of {layout.block} do not divide. "
                f"Leave it in 16 bits: --ignore '{name}'."
            )
    plain = [spec.dtype for spec in (source.tensors[f"{name}.weight"].spec for name in chosen)]
    dtype = torch.float16 if plain[0] == torch.float16 else torch.bfloat16
    units = _units(source, layout, chosen, dtype)
    kept = [name for name in linear if name not in set(chosen)]
    return Plan(_into_shards(units, max_shard_bytes), tuple(kept), dtype)


def linear_modules(folder: Path) -> tuple[list[str], str]:
    """Names of all nn.Linear modules of the folder's architecture, and the name of its output head ("" if none).

    transformers builds the model on the meta device: no weights, and no code from the folder.
    """
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise ValueError(
            f"transformers {transformers.__version__} can't build a causal language model from "
            f"{folder / 'config.json'}: {str(error).splitlines()[0]}"
        ) from error
    head = model.get_output_embeddings()
    names = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    return list(names), next((name for name, module in names.items() if module is head), "")


def _match(patterns: tuple[str, ...], names: list[str]) -> set[str]:
    """Names that match any pattern: a name, a shell pattern ("*.layers.0.*"), or a regular expression ("re:...")."""
    matched: set[str] = set()
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                expression = re.compile(pattern[3:])
            except re.error as error:
                raise ValueError(f"--ignore {pattern!r} is not a regular expression: {error}.") from error
            found = {name for name in names if expression.match(name)}
        else:
            found = set(fnmatch.filter(names, pattern))
        if not found:
            raise ValueError(
                f"--ignore {pattern!r} matches no linear layer. Layers have names such as {names[0]}; "
                "shell patterns ('*.layers.0.*') and regular expressions ('re:.*down_proj') are taken."
            )
        matched |= found
    return matched


def _units(source: Checkpoint, layout: Layout, chosen: list[str], dtype: torch.dtype) -> list[Unit]:
    """Every tensor of the source once, in its order; fused siblings stand where the first of them stood."""
    group_of: dict[str, tuple[str, ...]] = {name: (name,) for name in chosen}
    if layout.shares_global_scale:
        for name in chosen:
            parent, _, last = name.rpartition(".")
            for family in FUSED:
                if last in family:
                    siblings = (f"{parent}.{member}" if parent else member for member in family)
                    group_of[name] = tuple(member for member in siblings if member in group_of)
    units: list[Unit] = []
    done: set[str] = set()
    for tensor, where in source.tensors.items():
        module = tensor.removesuffix(".weight")
        if tensor.endswith(".weight") and module in group_of:
            if module in done:
                continue
            group = group_of[module]
            done.update(group)
            outputs = {
                member + suffix: spec
                for member in group
                for suffix, spec in layout.specs(source.tensors[f"{member}.weight"].spec).items()
            }
            units.append(Unit(group, "", outputs))
        else:
            spec = where.spec
            kept = dtype if spec.dtype in WIDE else spec.dtype
            units.append(Unit((), tensor, {tensor: Spec(kept, spec.shape)}))
    return units


def _into_shards(units: list[Unit], max_bytes: int) -> tuple[tuple[Unit, ...], ...]:
    shards: list[list[Unit]] = [[]]
    filled = 0
    for unit in units:
        if shards[-1] and filled + unit.nbytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(unit)
        filled += unit.nbytes
    return tuple(tuple(shard) for shard in shards)
