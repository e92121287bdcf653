"""Checkpoints and random weights into a `Decoder`, tensor by tensor, straight to the target device.

Beside the model being built there is never more than the tensors of one fused layer. A 16-bit checkpoint that is to
run on 4 bits goes through the streaming converter once; the result stays in the user's cache folder for the next time.
"""

import copy
import fcntl
import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from qerl.device import resolve_device
from qerl.kernels.quant_linear import Scratch
from qerl.model.adapter import load_adapter, read_settings
from qerl.model.architecture import GATE_UP, PROJECTIONS, QKV, Architecture, architecture_of
from qerl.model.decoder import Decoder
from qerl.model.layers import Attention, Block, DenseWeight, Mlp, Projection, QuantizedWeight, RMSNorm, Weight
from qerl.model.random_checkpoint import BLOCK_SCALE, CODES_STD, STD
from qerl.model.shapes import shape_named
from qerl.model.slow_layers import warn_of_slow_weights
from qerl.quant import mxfp4, nf4, nvfp4
from qerl.quant.checkpoint import Checkpoint, read_config, resolve
from qerl.quant.convert import convert, fingerprint
from qerl.quant.layout import Quantized, layout_for, layout_of
from qerl.quant.partial import writable
from qerl.quant.plan import BAD_CONFIG, make_plan

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
METHODS = ("rtn", "mse")
BASES = ("bf16", "nvfp4", "mxfp4", "nf4")
LARGE_COPY = 4 << 30  # bytes of dequantized weights on a CPU from which on the user is told

log = logging.getLogger(__name__)


def load(
    model: str,
    base: str = "nvfp4",
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    method: str = "mse",
    cache_dir: Path | str | None = None,
    adapter: Path | str | None = None,
) -> Decoder:
    """A `Decoder` from a folder or hub id.

    base: bf16 (16-bit weights as they are), nvfp4, mxfp4 or nf4. A checkpoint that is quantized already must be named
    by its own format; a 16-bit one is quantized with `method` (rtn or mse), and the result is kept in cache_dir
    (default ~/.cache/qerl). device: by default a GPU if there is one. dtype: of activations and 16-bit weights; by
    default bf16 on a GPU and float32 on a CPU. adapter: a PEFT folder to attach; what is none is refused first.
    """
    device, dtype = _place(base, device, dtype)
    if adapter is not None:
        read_settings(Path(adapter))
    folder = weights_folder(model, base, method, cache_dir)
    arch = architecture_in(folder)
    _warn_of_copies(arch, base, dtype, device)
    with Checkpoint(folder) as checkpoint:
        source = CheckpointSource(arch, checkpoint, dtype, device)
        decoder = build(arch, source, dtype, device, str(resolve(model)) if model == "tiny" else model)
        source.require_all_read()
    if adapter is not None:
        load_adapter(decoder, adapter)
    return decoder


def weights_folder(model: str, base: str, method: str = "mse", cache_dir: Path | str | None = None) -> Path:
    """The folder that `load` reads: the model's own, or its 4-bit form in the cache, made now if it is not there."""
    if method not in METHODS:
        raise ValueError(
            f"Loading rounds by {' or '.join(METHODS)}, not {method!r}; for others use `qerl quantize` first."
        )

    def check(folder: Path) -> None:
        architecture_in(folder)
        stored = read_config(folder).get("quantization_config")
        if stored and (format := layout_of(stored).format) != base:
            raise ValueError(f"{model} is quantized as {format}: load it with base={format!r}.")

    folder = resolve(model, check)
    if base == "bf16" or read_config(folder).get("quantization_config"):
        return folder
    return _quantized(folder, base, method, Path(cache_dir or Path.home() / ".cache" / "qerl"))


def load_random(
    shape: str,
    base: str = "nvfp4",
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    seed: int = 0,
    layers: int | None = None,
    repeat: bool = False,
) -> Decoder:
    """A `Decoder` with random weights of a named shape, made on the device: for benchmarks. layers: fewer than all.
    repeat: layers after the first are copies of it, which is faster by far."""
    import transformers

    device, dtype = _place(base, device, dtype)
    config = shape_named(shape).config()
    if layers is not None:
        config["num_hidden_layers"] = layers
    arch = architecture_of(transformers.AutoConfig.for_model(**config))
    _warn_of_copies(arch, base, dtype, device)
    return build(arch, RandomSource(arch, base, dtype, device, seed, repeat), dtype, device)


def require_base(base: str) -> None:
    """For those who have something to do before they load."""
    if base not in BASES:
        raise ValueError(f"There is no base {base!r}; choose one of {', '.join(BASES)}.")


def _place(
    base: str, device: str | torch.device | None, dtype: torch.dtype | str | None
) -> tuple[torch.device, torch.dtype]:
    require_base(base)
    where = resolve_device(device)
    if dtype is None:
        return where, torch.float32 if where.type == "cpu" else torch.bfloat16
    chosen = DTYPES.get(str(dtype).removeprefix("torch."))
    if chosen is None:
        raise ValueError(f"There is no compute dtype {dtype!r}; choose one of {', '.join(DTYPES)}.")
    return where, chosen


def _warn_of_copies(arch: Architecture, base: str, dtype: torch.dtype, device: torch.device) -> None:
    weights = arch.layers * sum(arch.outputs(name) * arch.inputs(name) for name in PROJECTIONS)
    nbytes = weights * dtype.itemsize
    if base != "bf16" and device.type == "cpu" and nbytes > LARGE_COPY:
        log.warning("On a CPU 4-bit layers keep a dequantized copy: %.1f GB of memory here.", nbytes / 1e9)


class Source(ABC):
    """Where weights come from, by the names that transformers gives them."""

    @abstractmethod
    def matrix(self, modules: tuple[str, ...]) -> Weight:
        """The weights of these linear modules, fused along N."""

    @abstractmethod
    def table(self, name: str) -> DenseWeight:
        """An embedding or head [V, D]."""

    @abstractmethod
    def vector(self, name: str) -> Tensor:
        """A gain or bias."""


def build(arch: Architecture, source: Source, dtype: torch.dtype, device: torch.device, name: str = "") -> Decoder:
    """The decoder from its weights; name: where they came from."""

    def norm(name: str, takes_noise: bool = False) -> RMSNorm:
        return RMSNorm(source.vector(f"{name}.weight"), arch.norm_eps, takes_noise)

    def projection(at: str, parts: tuple[str, ...]) -> Projection:
        biases = [source.vector(f"{at}.{part}.bias").to(dtype) for part in parts if part in arch.biased]
        weight = source.matrix(tuple(f"{at}.{part}" for part in parts))
        return Projection(parts, tuple(arch.outputs(p) for p in parts), weight, torch.cat(biases) if biases else None)

    def block(i: int) -> Block:
        at = f"model.layers.{i}"
        heads = [norm(f"{at}.self_attn.{n}") if arch.qk_norm else None for n in ("q_norm", "k_norm")]
        attention = Attention(
            arch, i, projection(f"{at}.self_attn", QKV), projection(f"{at}.self_attn", ("o_proj",)), *heads
        )
        mlp = Mlp(projection(f"{at}.mlp", GATE_UP), projection(f"{at}.mlp", ("down_proj",)))
        return Block(norm(f"{at}.input_layernorm", True), attention, norm(f"{at}.post_attention_layernorm", True), mlp)

    embedding = source.table("model.embed_tokens.weight")
    blocks = [block(i) for i in range(arch.layers)]
    head = None if arch.tied else source.table("lm_head.weight")
    decoder = Decoder(arch, embedding, blocks, norm("model.norm"), head, dtype, device, name)
    warn_of_slow_weights(decoder, dtype)
    return decoder


class CheckpointSource(Source):
    """Tensors of a checkpoint folder, plain or quantized. Each must have the shape that the architecture asks for."""

    def __init__(self, arch: Architecture, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.arch, self.checkpoint, self.dtype, self.device = arch, checkpoint, dtype, device
        self.quantized = set(checkpoint.quantized_modules)
        self.scratch = Scratch()
        self.used: set[str] = set()

    def matrix(self, modules: tuple[str, ...]) -> Weight:
        shapes = [_matrix_shape(self.arch, module) for module in modules]
        if any(module in self.quantized for module in modules):
            parts = [self._part(module, shape) for module, shape in zip(modules, shapes, strict=True)]
            on_cpu, paired = self.device.type == "cpu", _names(modules) == GATE_UP
            return QuantizedWeight(parts, self.dtype, on_cpu, self.scratch, paired)
        value = torch.empty(sum(n for n, _ in shapes), shapes[0][1], dtype=self.dtype, device=self.device)
        start = 0
        for module, (rows, _) in zip(modules, shapes, strict=True):
            self._read_into(f"{module}.weight", value[start : start + rows])
            start += rows
        return DenseWeight(value)

    def _part(self, module: str, shape: tuple[int, int]) -> Quantized | Tensor:
        if module not in self.quantized:
            return self._read(f"{module}.weight", shape, self.dtype)
        self.used |= {name for name in self.checkpoint.tensors if name.startswith(f"{module}.weight")}
        q = self.checkpoint.read_quantized(module, self.device)
        if tuple(q.shape) != shape:
            raise ValueError(f"{module} has shape {tuple(q.shape)}, where config.json asks for {shape}.")
        return q

    def table(self, name: str) -> DenseWeight:
        return DenseWeight(self._read(name, (self.arch.vocab, self.arch.hidden), self.dtype))

    def vector(self, name: str) -> Tensor:
        return self._read(name, (_vector_size(self.arch, name),), torch.float32)

    def require_all_read(self) -> None:
        """A tensor of a block that nothing reads belongs to a model that is not the one in config.json."""
        left = [n for n in self.checkpoint.tensors if n.startswith("model.layers.") and n not in self.used]
        left = [name for name in left if not name.endswith("inv_freq")]
        if left:
            raise ValueError(
                f"{self.checkpoint.folder} holds {len(left)} tensors that its architecture lacks, such as {left[0]}: "
                "config.json and weights belong to different models."
            )

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        value = torch.empty(shape, dtype=dtype, device=self.device)
        self._read_into(name, value)
        return value

    def _read_into(self, name: str, value: Tensor) -> None:
        if name not in self.checkpoint.tensors:
            raise ValueError(f"{self.checkpoint.folder} has no tensor {name}, which its architecture needs.")
        self.checkpoint.read_into(name, value)
        self.used.add(name)


def _matrix_shape(arch: Architecture, module: str) -> tuple[int, int]:
    last = module.rpartition(".")[2]
    return arch.outputs(last), arch.inputs(last)


def _names(modules: tuple[str, ...]) -> tuple[str, ...]:
    """Of the projections, without the places of their blocks."""
    return tuple(module.rpartition(".")[2] for module in modules)


def _vector_size(arch: Architecture, name: str) -> int:
    if name.endswith(".bias"):
        return arch.outputs(name.split(".")[-2])
    return arch.head_dim if re.search(r"\.[qk]_norm\.", name) else arch.hidden


class RandomSource(Source):
    """Random weights made on the device, 4-bit ones without ever being 16-bit: codes uniform, scales for a deviation
    of about .02. repeat: one random weight for each kind of layer, copied."""

    def __init__(
        self, arch: Architecture, base: str, dtype: torch.dtype, device: torch.device, seed: int, repeat: bool
    ) -> None:
        self.arch, self.base, self.dtype, self.device = arch, base, dtype, device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.made: dict[tuple[str, ...], Weight] | None = {} if repeat else None
        self.scratch = Scratch()

    def matrix(self, modules: tuple[str, ...]) -> Weight:
        if self.made is None:
            return self._made(modules)
        kind = _names(modules)
        if kind in self.made:
            return copy.deepcopy(self.made[kind], {id(self.scratch): self.scratch})  # of which there is one
        return self.made.setdefault(kind, self._made(modules))

    def _made(self, modules: tuple[str, ...]) -> Weight:
        shapes = [_matrix_shape(self.arch, module) for module in modules]
        if self.base == "bf16":
            return DenseWeight(self._normal((sum(n for n, _ in shapes), shapes[0][1])))
        parts: list[Quantized | Tensor] = [self._quantized(n, k) for n, k in shapes]
        on_cpu, paired = self.device.type == "cpu", _names(modules) == GATE_UP
        return QuantizedWeight(parts, self.dtype, on_cpu, self.scratch, paired)

    def table(self, name: str) -> DenseWeight:
        return DenseWeight(self._normal((self.arch.vocab, self.arch.hidden)))

    def vector(self, name: str) -> Tensor:
        value = 0.0 if name.endswith(".bias") else 1.0
        return torch.full((_vector_size(self.arch, name),), value, dtype=torch.float32, device=self.device)

    def _normal(self, shape: tuple[int, int]) -> Tensor:
        empty = torch.empty(shape, dtype=self.dtype, device=self.device)
        return empty.normal_(0.0, STD, generator=self.generator)

    def _quantized(self, n: int, k: int) -> Quantized:
        def codes(*shape: int) -> Tensor:
            return torch.randint(0, 256, shape, dtype=torch.uint8, device=self.device, generator=self.generator)

        if self.base == "nvfp4":  # uniform E2M1 codes have a deviation of 2.9
            scale = torch.full((n, k // nvfp4.BLOCK), BLOCK_SCALE, dtype=torch.float32, device=self.device)
            whole = torch.tensor([BLOCK_SCALE * CODES_STD / STD], dtype=torch.float32, device=self.device)
            return nvfp4.NVFP4(codes(n, k // 2), scale.to(torch.float8_e4m3fn), whole)
        if self.base == "mxfp4":  # 2**-7 * 2.9 = .023
            scale = torch.full((n, k // mxfp4.BLOCK), mxfp4.BIAS - 7, dtype=torch.uint8, device=self.device)
            return mxfp4.MXFP4(codes(n, k // 2), scale)
        # uniform NF4 codes have a deviation of .54
        absmax = torch.full((n * k // nf4.BLOCK,), STD / 0.54, dtype=torch.float32, device=self.device)
        return nf4.NF4(codes(n * k // 2), absmax, (n, k))


def architecture_in(folder: Path) -> Architecture:
    """What the model in a checkpoint folder is made of."""
    import transformers

    read_config(folder)  # its own message where there is none
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except BAD_CONFIG as error:
        raise ValueError(f"transformers can't read {folder / 'config.json'}: {str(error).splitlines()[0]}") from error
    return architecture_of(config)


def _quantized(folder: Path, base: str, method: str, cache_dir: Path) -> Path:
    """The folder's 4-bit form in the cache, made now if it is not there."""
    layout = layout_for(base)
    with Checkpoint(folder) as source:
        try:
            plan = make_plan(source, layout, (), int(2e9))
        except ValueError as error:
            raise ValueError(f"{error} (`qerl quantize` takes --ignore; load the folder that it makes.)") from error
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.name)
        out = cache_dir / "quantized" / f"{name}-{base}-{method}-{fingerprint(source, layout, plan, method)[:16]}"
        remedy = f"write the 4-bit form elsewhere and name that: qerl quantize {folder} OUT --format {base}"
        with _one_process_at_a_time(out, remedy):
            if not out.exists():
                log.warning("Quantizing %s to %s (%s); the result is kept in %s.", folder, base, method, out)
                convert(source, out, layout, plan, method, str(resolve_device(None)))
        try:
            Checkpoint(out)
        except ValueError as error:
            raise ValueError(f"The cached {out} is damaged ({error}) Delete it, and it is made again.") from error
    return out


@contextmanager
def _one_process_at_a_time(out: Path, remedy: str) -> Iterator[None]:
    """Processes that load the same model wait for the one that quantizes it. remedy: where `out` can't be written."""
    with writable(out.parent, remedy):
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(out.with_name(out.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
