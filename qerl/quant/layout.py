"""How each format lies in a checkpoint: tensor names, their shapes, and `config.json`'s `quantization_config`.

NVFP4 and MXFP4 use compressed-tensors' layouts, NF4 that of bitsandbytes. A layout also encodes a weight that
arrives in flat pieces: scales and codes are row-major like the weight, so any run of whole blocks can be encoded alone.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qerl.quant import mxfp4, nf4, nvfp4
from qerl.quant.mxfp4 import MXFP4
from qerl.quant.nf4 import NF4
from qerl.quant.nvfp4 import NVFP4
from qerl.quant.safetensors_io import Spec

Quantized = NVFP4 | MXFP4 | NF4


# Elements that are dequantized at a time: float32 temporaries take some ten times as many bytes.
DEQUANTIZE_CPU, DEQUANTIZE_GPU = 1 << 19, 1 << 26


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """A quantized weight of any format -> [N, K]."""
    out = torch.empty(q.shape, dtype=dtype, device=q.packed.device)
    dequantize_into(q, out)
    return out


def dequantize_into(q: Quantized, out_NK: Tensor) -> None:
    """The same into a tensor that is there, some rows at a time."""
    if isinstance(q, NF4) and isinstance(q.absmax, nf4.Nested):
        q = NF4(q.packed, q.absmax.dequantize(), q.shape, q.block)
    rows = max(1, (DEQUANTIZE_GPU if out_NK.is_cuda else DEQUANTIZE_CPU) // out_NK.shape[1])
    for start in range(0, out_NK.shape[0], rows):
        part = out_NK[start : start + rows]
        part.copy_(_dequantize_rows(q, start, start + len(part)))


def _dequantize_rows(q: Quantized, start: int, end: int) -> Tensor:
    if isinstance(q, NVFP4):
        return nvfp4.dequantize(NVFP4(q.packed[start:end], q.scale[start:end], q.global_scale))
    if isinstance(q, MXFP4):
        return mxfp4.dequantize(MXFP4(q.packed[start:end], q.scale[start:end]))
    k = q.shape[1]
    if k % q.block:  # blocks straddle rows
        return nf4.dequantize(q)[start:end]
    assert isinstance(q.absmax, Tensor)
    blocks = q.absmax[start * k // q.block : end * k // q.block]
    return nf4.dequantize(NF4(q.packed[start * k // 2 : end * k // 2], blocks, (end - start, k), q.block))


class Encoder(ABC):
    """Encodes one weight piece by piece. `add` returns what the piece adds to each tensor of the file and the piece as
    it will be read back; `finish` returns what only the end knows."""

    @abstractmethod
    def add(self, piece_E: Tensor) -> tuple[dict[str, Tensor], Tensor]: ...

    @abstractmethod
    def finish(self) -> dict[str, Tensor]: ...


class Layout(ABC):
    """One format in a checkpoint. Names below are suffixes to a module's name ("...q_proj" + ".weight_packed")."""

    format: str
    block: int
    shares_global_scale: bool  # whether fused layers must be given one global scale

    @abstractmethod
    def specs(self, spec: Spec) -> dict[str, Spec]:
        """The tensors that stand for a weight of this spec."""

    @abstractmethod
    def encoder(self, spec: Spec, method: str, amax: Tensor | None, name: str) -> Encoder: ...

    @abstractmethod
    def decode(self, read: Callable[[str], Tensor], has: Callable[[str], bool]) -> Quantized:
        """Assemble a weight from its tensors."""

    @abstractmethod
    def config(self, ignore: list[str], dtype: torch.dtype) -> dict[str, Any]:
        """The `quantization_config` of config.json; `ignore` names the linear modules left in 16 bits."""


def _compressed_tensors_config(
    layout: str, strategy: str, block: int, scale_dtype: str, ignore: list[str]
) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": strategy,
        "group_size": block,
        "dynamic": False,
        "scale_dtype": scale_dtype,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": layout}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


class NVFP4Layout(Layout):
    format, block, shares_global_scale = "nvfp4", nvfp4.BLOCK, True

    def specs(self, spec: Spec) -> dict[str, Spec]:
        n, k = spec.shape
        return {
            ".weight_packed": Spec(torch.uint8, (n, k // 2)),
            ".weight_scale": Spec(torch.float8_e4m3fn, (n, k // nvfp4.BLOCK)),
            ".weight_global_scale": Spec(torch.float32, (1,)),
        }

    def encoder(self, spec: Spec, method: str, amax: Tensor | None, name: str) -> Encoder:
        assert amax is not None, "NVFP4 needs the largest magnitude of the tensors that share its global scale"
        return _NVFP4Encoder(method, nvfp4.global_scale(amax), name)

    def decode(self, read: Callable[[str], Tensor], has: Callable[[str], bool]) -> NVFP4:
        return NVFP4(read(".weight_packed"), read(".weight_scale"), read(".weight_global_scale").reshape(1))

    def config(self, ignore: list[str], dtype: torch.dtype) -> dict[str, Any]:
        return _compressed_tensors_config(
            "nvfp4-pack-quantized", "tensor_group", nvfp4.BLOCK, "torch.float8_e4m3fn", ignore
        )


class _NVFP4Encoder(Encoder):
    def __init__(self, method: str, global_scale_1: Tensor, name: str) -> None:
        self.method, self.global_scale_1, self.name = method, global_scale_1, name

    def add(self, piece_E: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        q = nvfp4.quantize(piece_E, self.method, self.global_scale_1, self.name)
        return {".weight_packed": q.packed, ".weight_scale": q.scale}, nvfp4.dequantize(q)

    def finish(self) -> dict[str, Tensor]:
        return {".weight_global_scale": self.global_scale_1}


class MXFP4Layout(Layout):
    format, block, shares_global_scale = "mxfp4", mxfp4.BLOCK, False

    def specs(self, spec: Spec) -> dict[str, Spec]:
        n, k = spec.shape
        return {
            ".weight_packed": Spec(torch.uint8, (n, k // 2)),
            ".weight_scale": Spec(torch.uint8, (n, k // mxfp4.BLOCK)),
        }

    def encoder(self, spec: Spec, method: str, amax: Tensor | None, name: str) -> Encoder:
        return _MXFP4Encoder(method, name)

    def decode(self, read: Callable[[str], Tensor], has: Callable[[str], bool]) -> MXFP4:
        return MXFP4(read(".weight_packed"), read(".weight_scale"))

    def config(self, ignore: list[str], dtype: torch.dtype) -> dict[str, Any]:
        return _compressed_tensors_config("mxfp4-pack-quantized", "group", mxfp4.BLOCK, "torch.uint8", ignore)


class _MXFP4Encoder(Encoder):
    def __init__(self, method: str, name: str) -> None:
        self.method, self.name = method, name

    def add(self, piece_E: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        q = mxfp4.quantize(piece_E, self.method, self.name)
        return {".weight_packed": q.packed, ".weight_scale": q.scale}, mxfp4.dequantize(q)

    def finish(self) -> dict[str, Tensor]:
        return {}


class NF4Layout(Layout):
    """bitsandbytes' layout. Its CPU dequantizer misreads rows that blocks of 64 do not divide, so such are refused."""

    format, block, shares_global_scale = "nf4", nf4.BLOCK, False
    STATE_BYTES = 256  # JSON of the quantization state, padded with blanks so that its size is known before its content

    def __init__(self, double_quant: bool = False) -> None:
        self.double_quant = double_quant

    def specs(self, spec: Spec) -> dict[str, Spec]:
        blocks = -(-spec.numel // nf4.BLOCK)
        specs = {
            ".weight": Spec(torch.uint8, (spec.numel // 2, 1)),
            ".weight.absmax": Spec(torch.uint8 if self.double_quant else torch.float32, (blocks,)),
            ".weight.quant_map": Spec(torch.float32, (16,)),
            ".weight.quant_state.bitsandbytes__nf4": Spec(torch.uint8, (self.STATE_BYTES,)),
        }
        if self.double_quant:
            specs[".weight.nested_absmax"] = Spec(torch.float32, (-(-blocks // nf4.NESTED_BLOCK),))
            specs[".weight.nested_quant_map"] = Spec(torch.float32, (256,))
        return specs

    def encoder(self, spec: Spec, method: str, amax: Tensor | None, name: str) -> Encoder:
        return _NF4Encoder(spec, method, self.double_quant, name)

    def decode(self, read: Callable[[str], Tensor], has: Callable[[str], bool]) -> NF4:
        state = json.loads(bytes(read(".weight.quant_state.bitsandbytes__nf4").tolist()))
        stored = read(".weight.absmax")
        absmax: Tensor | nf4.Nested = stored
        if has(".weight.nested_absmax"):
            if state["nested_blocksize"] != nf4.NESTED_BLOCK:
                raise ValueError(f"Double quantization in blocks of {state['nested_blocksize']} is not supported.")
            absmax = nf4.Nested(
                stored,
                read(".weight.nested_absmax"),
                read(".weight.nested_quant_map"),
                torch.tensor(state["nested_offset"], dtype=torch.float32, device=stored.device),
            )
        return NF4(read(".weight").flatten().view(torch.uint8), absmax, tuple(state["shape"]), state["blocksize"])

    def config(self, ignore: list[str], dtype: torch.dtype) -> dict[str, Any]:
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "_load_in_4bit": True,
            "_load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": self.double_quant,
            "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": ignore,
            "llm_int8_threshold": 6.0,
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False,
        }


class _NF4Encoder(Encoder):
    def __init__(self, spec: Spec, method: str, double_quant: bool, name: str) -> None:
        self.spec, self.method, self.double_quant, self.name = spec, method, double_quant, name
        self.absmax: list[Tensor] = []

    def add(self, piece_E: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        q = nf4.quantize(piece_E, self.method, name=self.name)
        assert isinstance(q.absmax, Tensor)
        if not self.double_quant:
            return {".weight": q.packed, ".weight.absmax": q.absmax}, nf4.dequantize(q)
        # The 8-bit absmax needs the mean of all; the error of a piece is measured before that second rounding.
        self.absmax.append(q.absmax)
        return {".weight": q.packed}, nf4.dequantize(q)

    def finish(self) -> dict[str, Tensor]:
        state: dict[str, Any] = {
            "quant_type": "nf4",
            "blocksize": nf4.BLOCK,
            "dtype": str(self.spec.dtype).removeprefix("torch."),
            "shape": list(self.spec.shape),
        }
        tensors = {".weight.quant_map": nf4.codebook()}
        if self.double_quant:
            nested = nf4.nest(torch.cat(self.absmax))
            state |= {
                "nested_blocksize": nf4.NESTED_BLOCK,
                "nested_dtype": "float32",
                "nested_offset": nested.offset.item(),
            }
            tensors |= {
                ".weight.absmax": nested.code,
                ".weight.nested_absmax": nested.absmax,
                ".weight.nested_quant_map": nested.table,
            }
        raw = json.dumps(state).encode().ljust(NF4Layout.STATE_BYTES)
        tensors[".weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(raw), dtype=torch.uint8)
        return tensors


def layout_for(format: str, double_quant: bool = False) -> Layout:
    """The layout of a format by its name."""
    layouts: dict[str, Layout] = {
        "nvfp4": NVFP4Layout(),
        "mxfp4": MXFP4Layout(),
        "nf4": NF4Layout(double_quant),
    }
    return layouts[format]


def layout_of(quantization_config: dict[str, Any]) -> Layout:
    """The layout that a checkpoint's `quantization_config` declares; others are refused with what is supported."""
    method = quantization_config.get("quant_method")
    if method == "compressed-tensors":
        if quantization_config.get("transform_config"):
            raise ValueError("The checkpoint uses transforms (transform_config), which qerl does not support.")
        groups = list(quantization_config.get("config_groups", {}).values())
        formats = {group.get("format") or quantization_config.get("format") for group in groups}
        if formats == {"nvfp4-pack-quantized"}:
            return NVFP4Layout()
        if formats == {"mxfp4-pack-quantized"}:
            return MXFP4Layout()
        found = f"compressed-tensors {sorted(map(str, formats))}"
    elif method == "bitsandbytes" and quantization_config.get("bnb_4bit_quant_type") == "nf4":
        return NF4Layout(bool(quantization_config.get("bnb_4bit_use_double_quant")))
    else:
        found = str(method)
    raise ValueError(
        f"The checkpoint is quantized as {found}; qerl reads compressed-tensors nvfp4-pack-quantized and "
        "mxfp4-pack-quantized, and bitsandbytes nf4."
    )
