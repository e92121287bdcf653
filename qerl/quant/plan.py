"""What a conversion will do, decided before any weight is read: which tensors are quantized together, which are copied,
and in which shard of the output each result lies. Everything that can be refused is refused here."""

import fnmatch
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError

from qerl.quant.blocks import FLOAT_DTYPES
from qerl.quant.checkpoint import Checkpoint, read_config
from qerl.quant.layout import Layout
from qerl.quant.safetensors_io import Spec

# What transformers raises on a configuration that it can't use.
BAD_CONFIG = (
    ValueError, LookupError, TypeError, AttributeError, OSError, ArithmeticError, ImportError, StrictDataclassError,
)  # fmt: skip
# Layers that serving engines fuse into one matrix, and which therefore share a global scale.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


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


@dataclass(frozen=True)
class Skeleton:
    """What a folder's model is made of, by its configuration alone."""

    architecture: str
    linear: tuple[str, ...]  # the linear modules, without the head
    head: str  # the output head's module, "" if there is none
    shapes: dict[str, tuple[int, ...]]  # of every tensor that the checkpoint must hold


def skeleton(folder: Path) -> Skeleton:
    """Asks transformers, which builds the model on the meta device: no weights, and no code from the folder.

    Refuses what can't be converted: quantized models, unknown architectures, none or odd linear layers.
    """
    import transformers

    config = read_config(folder)
    if stored := config.get("quantization_config"):
        method = stored.get("quant_method", "an unknown method")
        raise ValueError(f"{folder} is already quantized ({method}). Start from the 16-bit model.")
    try:
        settings = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(settings, trust_remote_code=False)
    except BAD_CONFIG as e:
        raise ValueError(
            f"transformers {transformers.__version__} can't build a causal language model from "
            f"{folder / 'config.json'}: {(str(e) or type(e).__name__).splitlines()[0]}"
        ) from e
    architecture = ", ".join(config.get("architectures") or [config.get("model_type", "?")])
    modules = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    output = model.get_output_embeddings()
    head = next((name for name, module in modules.items() if module is output), "")
    body = [name for name in modules if name != head]
    if not body:
        raise ValueError(f"{architecture} has no linear layers besides its head: there is nothing to quantize.")
    if odd := {type(modules[name]).__name__ for name in body if type(modules[name]) is not torch.nn.Linear}:
        raise ValueError(
            f"{architecture} has linear layers of its own kind ({', '.join(odd)}), which can't be quantized."
        )
    if experts := [name for name, parameter in model.named_parameters() if parameter.dim() > 2]:
        raise ValueError(f"{architecture} is a mixture of experts ({experts[0]}), which is not supported.")
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if head and output is not None and output.weight is model.get_input_embeddings().weight:
        shapes.pop(f"{head}.weight")
    return Skeleton(architecture, tuple(body), head, shapes)


def make_plan(source: Checkpoint, layout: Layout, ignore: tuple[str, ...], max_shard_bytes: int) -> Plan:
    """Refuses, with the remedy, whatever can't be converted."""
    bones = skeleton(source.folder)
    _require_same(source, bones)
    ignored = _match(ignore, [*bones.linear, *([bones.head] if bones.head else [])])
    chosen = [name for name in bones.linear if name not in ignored]
    if not chosen:
        raise ValueError("--ignore covers every linear layer: there is nothing left to quantize.")
    main = source.tensors[f"{chosen[0]}.weight"].spec.dtype
    for name in chosen:
        if (dtype := source.tensors[f"{name}.weight"].spec.dtype) not in FLOAT_DTYPES:
            raise ValueError(
                f"{name}.weight is {dtype}; weights must be bfloat16, float16 or float32. Convert them first."
            )
    undivided = [name for name in chosen if bones.shapes[f"{name}.weight"][-1] % layout.block]
    if undivided:
        kinds = dict.fromkeys(name.rpartition(".")[2] for name in undivided)
        inputs = bones.shapes[f"{undivided[0]}.weight"][-1]
        raise ValueError(
            f"{undivided[0]} has {inputs} inputs, which {layout.format}'s blocks of {layout.block} do not divide "
            f"({len(undivided)} such layers). Leave them in 16 bits: "
            + " ".join(f"--ignore '*.{kind}'" for kind in kinds)
        )
    # compressed-tensors always dequantizes to bf16; what stays beside must match.
    dtype = torch.float16 if main == torch.float16 and layout.format == "nf4" else torch.bfloat16
    kept = [name for name in (*bones.linear, *([bones.head] if bones.head else [])) if name not in set(chosen)]
    return Plan(_into_shards(_units(source, layout, chosen, main, dtype), max_shard_bytes), tuple(kept), dtype)


def _require_same(source: Checkpoint, bones: Skeleton) -> None:
    """The checkpoint holds what its configuration says."""
    missing = [name for name in bones.shapes if name not in source.tensors]
    if missing:
        raise ValueError(
            f"{source.folder} lacks {len(missing)} of the {len(bones.shapes)} tensors of {bones.architecture}, such as "
            f"{missing[0]}: its config.json belongs to another model, or it is not a whole causal language model."
        )
    for name, shape in bones.shapes.items():
        if (found := source.tensors[name].spec.shape) != shape:
            raise ValueError(
                f"{name} has shape {found}, but {source.folder / 'config.json'} asks for {shape}: they belong to "
                "different models."
            )


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


def _units(source: Checkpoint, layout: Layout, chosen: list[str], main: torch.dtype, dtype: torch.dtype) -> list[Unit]:
    """Every tensor of the source once, in its order; fused siblings stand where the first of them stood.

    Tensors of the linear layers' own dtype (`main`) are kept in `dtype`; others, such as float32 ones in a bf16 model,
    stay as they are.
    """
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
            kept = dtype if spec.dtype == main else spec.dtype
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
