"""Checkpoints and random weights into a `Decoder`, tensor by tensor, straight to the target device.

Beside the model being built there is never more than the tensors of one fused layer. A 16-bit checkpoint that is to
run on 4 bits goes through the streaming converter once; the result stays in the user's cache folder for the next time.
"""

import logging
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qerl.model.architecture import PROJECTIONS, QKV, Architecture, architecture_of
from qerl.model.decoder import Decoder
from qerl.model.layers import Attention, Block, DenseWeight, Mlp, Projection, QuantizedWeight, RMSNorm, Weight
from qerl.model.shapes import shape_named
from qerl.quant import mxfp4, nf4, nvfp4
from qerl.quant.checkpoint import Checkpoint, resolve
from qerl.quant.convert import convert, fingerprint
from qerl.quant.layout import Quantized, layout_for, layout_of
from qerl.quant.plan import make_plan

BASES = ("bf16", "nvfp4", "mxfp4", "nf4")
LARGE_COPY = 4 << 30  # bytes of dequantized weights on a CPU from which on the user is told

log = logging.getLogger(__name__)


def load(
    model: str,
    base: str = "nvfp4",
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    method: str = "mse",
    cache_dir: Path | None = None,
) -> Decoder:
    """A `Decoder` from a folder or hub id.

    base: bf16 (16-bit weights as they are), nvfp4, mxfp4 or nf4. A checkpoint that is quantized already must be named
    by its own format; a 16-bit one is quantized with `method` (rtn or mse), and the result is kept in cache_dir
    (default ~/.cache/qerl). device: by default a GPU if there is one. dtype: of activations and 16-bit weights; by
    default bf16 on a GPU and float32 on a CPU.
    """
    if base not in BASES:
        raise ValueError(f"There is no base {base!r}; choose one of {', '.join(BASES)}.")
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    folder = resolve(model)
    arch = _architecture(folder)
    with Checkpoint(folder) as plain:
        stored = plain.config.get("quantization_config")
        if stored is not None and layout_of(stored).format != base:
            raise ValueError(
                f"{model} is quantized as {layout_of(stored).format}: load it with base={base_of(stored)!r}."
            )
        if stored is None and base != "bf16":
            folder = _quantized(plain, base, method, cache_dir or Path.home() / ".cache" / "qerl")
    with Checkpoint(folder) as checkpoint:
        return build(arch, CheckpointSource(checkpoint, dtype, device), dtype, device)


def load_random(
    shape: str,
    base: str = "nvfp4",
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    layers: int | None = None,
) -> Decoder:
    """A `Decoder` with random weights of a named shape, made on the device: for benchmarks. layers: fewer than all."""
    import transformers

    if base not in BASES:
        raise ValueError(f"There is no base {base!r}; choose one of {', '.join(BASES)}.")
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    config = shape_named(shape).config()
    if layers is not None:
        config["num_hidden_layers"] = layers
    arch = architecture_of(transformers.AutoConfig.for_model(**config))
    return build(arch, RandomSource(arch, base, dtype, device, seed), dtype, device)


def base_of(quantization_config: dict[str, Any]) -> str:
    return layout_of(quantization_config).format


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


def build(arch: Architecture, source: Source, dtype: torch.dtype, device: torch.device) -> Decoder:
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
        mlp = Mlp(projection(f"{at}.mlp", ("gate_proj", "up_proj")), projection(f"{at}.mlp", ("down_proj",)))
        return Block(norm(f"{at}.input_layernorm", True), attention, norm(f"{at}.post_attention_layernorm", True), mlp)

    embedding = source.table("model.embed_tokens.weight")
    blocks = [block(i) for i in range(arch.layers)]
    head = None if arch.tied else source.table("lm_head.weight")
    model = Decoder(arch, embedding, blocks, norm("model.norm"), head, dtype, device)
    kept = [m.kept for m in model.modules() if isinstance(m, QuantizedWeight) and m.kept is not None]
    if (nbytes := sum(copy.nbytes for copy in kept)) > LARGE_COPY:
        log.warning("On a CPU 4-bit layers keep a dequantized copy: %.1f GB of memory here.", nbytes / 1e9)
    return model


class CheckpointSource(Source):
    """Tensors of a checkpoint folder, plain or quantized."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.checkpoint, self.dtype, self.device = checkpoint, dtype, device
        self.quantized = set(checkpoint.quantized_modules)

    def matrix(self, modules: tuple[str, ...]) -> Weight:
        if not any(module in self.quantized for module in modules):
            specs = [self._where(f"{module}.weight") for module in modules]
            value = torch.empty(sum(s[0] for s in specs), specs[0][1], dtype=self.dtype, device=self.device)
            start = 0
            for module, (rows, _) in zip(modules, specs, strict=True):
                self.checkpoint.read_into(f"{module}.weight", value[start : start + rows])
                start += rows
            return DenseWeight(value)
        parts: list[Quantized | Tensor] = [
            self.checkpoint.read_quantized(module, self.device)
            if module in self.quantized
            else self._read(f"{module}.weight", self.dtype)
            for module in modules
        ]
        return QuantizedWeight(parts, self.dtype, keep_copy=self.device.type == "cpu")

    def table(self, name: str) -> DenseWeight:
        return DenseWeight(self._read(name, self.dtype))

    def vector(self, name: str) -> Tensor:
        return self._read(name, torch.float32)

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        value = torch.empty(self._where(name), dtype=dtype, device=self.device)
        self.checkpoint.read_into(name, value)
        return value

    def _where(self, name: str) -> tuple[int, ...]:
        if name not in self.checkpoint.tensors:
            raise ValueError(f"{self.checkpoint.folder} has no tensor {name}, which its architecture needs.")
        return self.checkpoint.tensors[name].spec.shape


class RandomSource(Source):
    """Random weights made on the device, 4-bit ones without ever being 16-bit: codes uniform, scales for a deviation
    of about .02."""

    STD = 0.02

    def __init__(self, arch: Architecture, base: str, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.arch, self.base, self.dtype, self.device = arch, base, dtype, device
        self.generator = torch.Generator(device).manual_seed(seed)

    def matrix(self, modules: tuple[str, ...]) -> Weight:
        shapes = []
        for module in modules:
            last = module.rpartition(".")[2]
            assert last in PROJECTIONS
            shapes.append((self.arch.outputs(last), self.arch.inputs(last)))
        if self.base == "bf16":
            return DenseWeight(self._normal((sum(n for n, _ in shapes), shapes[0][1])))
        parts: list[Quantized | Tensor] = [self._quantized(n, k) for n, k in shapes]
        return QuantizedWeight(parts, self.dtype, keep_copy=self.device.type == "cpu")

    def table(self, name: str) -> DenseWeight:
        return DenseWeight(self._normal((self.arch.vocab, self.arch.hidden)))

    def vector(self, name: str) -> Tensor:
        if name.endswith(".bias"):
            return torch.zeros(self.arch.outputs(name.split(".")[-2]), device=self.device)
        size = self.arch.head_dim if re.search(r"\.[qk]_norm\.", name) else self.arch.hidden
        return torch.ones(size, device=self.device)

    def _normal(self, shape: tuple[int, int]) -> Tensor:
        empty = torch.empty(shape, dtype=self.dtype, device=self.device)
        return empty.normal_(0.0, self.STD, generator=self.generator)

    def _quantized(self, n: int, k: int) -> Quantized:
        def codes(*shape: int) -> Tensor:
            return torch.randint(0, 256, shape, dtype=torch.uint8, device=self.device, generator=self.generator)

        if self.base == "nvfp4":  # uniform E2M1 codes have a deviation of 2.9
            scale = torch.full((n, k // nvfp4.BLOCK), 64.0, device=self.device).to(torch.float8_e4m3fn)
            return nvfp4.NVFP4(codes(n, k // 2), scale, torch.tensor([64.0 * 2.9 / self.STD], device=self.device))
        if self.base == "mxfp4":  # 2**-7 * 2.9 = .023
            scale = torch.full((n, k // mxfp4.BLOCK), mxfp4.BIAS - 7, dtype=torch.uint8, device=self.device)
            return mxfp4.MXFP4(codes(n, k // 2), scale)
        absmax = torch.full((n * k // nf4.BLOCK,), self.STD / 0.54, device=self.device)  # uniform NF4 codes: .54
        return nf4.NF4(codes(n * k // 2), absmax, (n, k))


def _architecture(folder: Path) -> Architecture:
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(f"{folder / 'config.json'} can't be read: {str(error).splitlines()[0]}") from error
    return architecture_of(config)


def _quantized(source: Checkpoint, base: str, method: str, cache_dir: Path) -> Path:
    """The folder's 4-bit form in the cache, made now if it is not there."""
    layout = layout_for(base)
    plan = make_plan(source, layout, (), int(2e9))
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", source.folder.name)
    out = cache_dir / "quantized" / f"{name}-{base}-{method}-{fingerprint(source, layout, plan, method)[:16]}"
    if not out.exists():
        log.info("Quantizing %s to %s (%s); the result is kept in %s.", source.folder, base, method, out)
        convert(source, out, layout, plan, method, "cuda" if torch.cuda.is_available() else "cpu")
    return out
