"""The trained model's weights by the names that transformers gives them, one at a time, in float32.

Gains are rounded when they are written in 16 bits: next to 1 a bf16 number has neighbours .004 to .008 away, more than
training moves a gain. What rounding takes from a trained gain is therefore given to the columns of the matrices that
read its norm (W diag(g / round(g))), so that nothing is lost beyond the rounding of the matrices themselves.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor

from qerl.model.adapter import PREFIX, read_settings
from qerl.model.adapter import WEIGHTS as ADAPTER_WEIGHTS
from qerl.model.architecture import GATE_UP, PROJECTIONS, QKV, Architecture
from qerl.quant.checkpoint import Checkpoint
from qerl.quant.layout import dequantize
from qerl.quant.safetensors_io import Reader, read_header

READERS = {  # of a norm's output
    "input_layernorm": tuple(f"self_attn.{part}" for part in QKV),
    "post_attention_layernorm": tuple(f"mlp.{part}" for part in GATE_UP),
}


class Values(Protocol):
    def value(self, name: str) -> Tensor:
        """A weight of the trained model, float32."""


def weight_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Every weight of a plain checkpoint with its shape, in the order of the layers."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (arch.vocab, arch.hidden)}
    for i in range(arch.layers):
        at = f"model.layers.{i}"
        for part in PROJECTIONS:
            module = f"{at}.{'self_attn' if part in (*QKV, 'o_proj') else 'mlp'}.{part}"
            shapes[f"{module}.weight"] = (arch.outputs(part), arch.inputs(part))
            if part in arch.biased:
                shapes[f"{module}.bias"] = (arch.outputs(part),)
        if arch.qk_norm:
            shapes |= {f"{at}.self_attn.{norm}.weight": (arch.head_dim,) for norm in ("q_norm", "k_norm")}
        shapes |= {f"{at}.{norm}.weight": (arch.hidden,) for norm in READERS}
    shapes["model.norm.weight"] = (arch.hidden,)
    return shapes if arch.tied else shapes | {"lm_head.weight": (arch.vocab, arch.hidden)}


class MergedValues:
    """A base, dequantized, with an adapter merged into it. dtype: what the values will be written in."""

    def __init__(self, base: Checkpoint, adapter: Path, dtype: torch.dtype) -> None:
        self.base, self.dtype = base, dtype
        self.quantized = set(base.quantized_modules)
        self.scale = read_settings(adapter).scale
        stored = load_file(adapter / ADAPTER_WEIGHTS)
        self.adapter = {name.removeprefix(PREFIX): value for name, value in stored.items()}

    def value(self, name: str) -> Tensor:
        if name in self.adapter:  # a trained norm
            return self.adapter[name].to(torch.float32)
        module = name.removesuffix(".weight")
        value = self.base_value(name)
        if f"{module}.lora_A.weight" in self.adapter:
            a_RK, b_NR = (self.adapter[f"{module}.lora_{x}.weight"].to(torch.float32) for x in "AB")
            value.addmm_(b_NR, a_RK, alpha=self.scale)
        for gain_D in self._rounded_gain(module):
            value *= gain_D
        return value

    def base_value(self, name: str) -> Tensor:
        """Without what was trained."""
        module = name.removesuffix(".weight")
        return (
            dequantize(self.base.read_quantized(module))
            if module in self.quantized
            else self.base.read(name).to(torch.float32)
        )

    def _rounded_gain(self, module: str) -> Iterator[Tensor]:
        """g / round(g) of a trained norm that the module reads."""
        for norm, readers in READERS.items():
            for reader in readers:
                gain_D = self.adapter.get(f"{module.removesuffix(reader)}{norm}.weight")
                if module.endswith(f".{reader}") and gain_D is not None:
                    gain_D = gain_D.to(torch.float32)
                    rounded_D = gain_D.to(self.dtype).to(torch.float32)
                    yield torch.where(rounded_D == 0, 1.0, gain_D / rounded_D)


class FullValues:
    """The weights of full training, from the file of a checkpoint, where fused layers are one tensor."""

    def __init__(self, path: Path, arch: Architecture) -> None:
        self.places, self.arch, self.reader = read_header(path), arch, Reader()

    def value(self, name: str) -> Tensor:
        held, start, rows = self._place(name)
        where = self.places[held]
        width = where.spec.numel // where.spec.shape[0]
        piece = self.reader.read(where, start * width, rows * width).to(torch.float32)
        return piece.view(rows, *where.spec.shape[1:])

    def __enter__(self) -> "FullValues":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.reader.__exit__(None, None, None)

    def _place(self, name: str) -> tuple[str, int, int]:
        """(the decoder's name, first row, rows)"""
        whole = {
            "model.embed_tokens.weight": "embedding.trained.master",
            "lm_head.weight": "untied_head.trained.master",
            "model.norm.weight": "norm.trained",
        }
        held = whole.get(name) or self._in_block(name)
        rows = self.places[held].spec.shape[0]
        part = name.split(".")[-2]
        for family in (QKV, GATE_UP):
            if part in family:
                before = family[: family.index(part)]
                return held, sum(self.arch.outputs(other) for other in before), self.arch.outputs(part)
        return held, 0, rows

    def _in_block(self, name: str) -> str:
        _, _, index, *rest = name.split(".")
        *_, part, kind = rest
        norms = {"input_layernorm": "input_norm", "post_attention_layernorm": "post_attention_norm"}
        norms |= {"q_norm": "attention.q_norm", "k_norm": "attention.k_norm"}
        if part in norms:
            return f"blocks.{index}.{norms[part]}.trained"
        fused = dict.fromkeys(QKV, "attention.qkv") | {"o_proj": "attention.o", "down_proj": "mlp.down"}
        fused |= dict.fromkeys(GATE_UP, "mlp.gate_up")
        return f"blocks.{index}.{fused[part]}.{'trained_bias' if kind == 'bias' else 'weight.trained'}.master"
