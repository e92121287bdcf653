"""Shapes of public models by name: enough to know every tensor without a download.

Figures are those of the models' published config.json files.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from qerl.model.architecture import SUPPORTED
from qerl.quant.checkpoint import read_config
from qerl.quant.safetensors_io import Spec
from qerl.tiny import tiny_model_folder


@dataclass(frozen=True)
class Shape:
    """A decoder with grouped-query attention, SwiGLU and RMSNorm, in the form of one of the families."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int = 151936
    tied: bool = False
    head_dim: int = 128
    form: str = "qwen2"  # qwen2: biases on q, k, v; qwen3: norms on q and k; llama and mistral: neither
    rope_theta: float = 1000000.0
    context: int = 32768  # tokens of the longest sequence

    def tensors(self) -> dict[str, Spec]:
        """Every tensor of a bf16 checkpoint by its name in transformers."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for i in range(self.layers):
            at = f"model.layers.{i}"
            for name, outputs in (("q", q), ("k", kv), ("v", kv)):
                shapes[f"{at}.self_attn.{name}_proj.weight"] = (outputs, self.hidden)
                if self.form == "qwen2":
                    shapes[f"{at}.self_attn.{name}_proj.bias"] = (outputs,)
            if self.form == "qwen3":
                shapes |= {f"{at}.self_attn.{name}_norm.weight": (self.head_dim,) for name in "qk"}
            shapes |= {
                f"{at}.self_attn.o_proj.weight": (self.hidden, q),
                f"{at}.mlp.gate_proj.weight": (self.intermediate, self.hidden),
                f"{at}.mlp.up_proj.weight": (self.intermediate, self.hidden),
                f"{at}.mlp.down_proj.weight": (self.hidden, self.intermediate),
                f"{at}.input_layernorm.weight": (self.hidden,),
                f"{at}.post_attention_layernorm.weight": (self.hidden,),
            }
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return {name: Spec(torch.bfloat16, shape) for name, shape in shapes.items()}

    def config(self) -> dict[str, Any]:
        """config.json for transformers."""
        return {
            "architectures": [f"{self.form.capitalize()}ForCausalLM"],
            "model_type": self.form,
            "dtype": "bfloat16",
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.context,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_theta": self.rope_theta,
            "sliding_window": None,
            "tie_word_embeddings": self.tied,
            "vocab_size": self.vocab,
        }


SHAPES = {
    "toy": Shape(256, 4, 768, 4, 2, vocab=4096, tied=True, head_dim=64),
    "qwen2.5-0.5b": Shape(896, 24, 4864, 14, 2, tied=True, head_dim=64),
    "qwen2.5-1.5b": Shape(1536, 28, 8960, 12, 2, tied=True),
    "qwen2.5-3b": Shape(2048, 36, 11008, 16, 2, tied=True),
    "qwen2.5-7b": Shape(3584, 28, 18944, 28, 4, vocab=152064),
    "qwen2.5-14b": Shape(5120, 48, 13824, 40, 8, vocab=152064),
    "qwen2.5-32b": Shape(5120, 64, 27648, 40, 8, vocab=152064),
    "qwen3-4b": Shape(2560, 36, 9728, 32, 8, tied=True, form="qwen3", context=40960),
    "qwen3-8b": Shape(4096, 36, 12288, 32, 8, form="qwen3", context=40960),
    "llama-3.1-8b": Shape(4096, 32, 14336, 32, 8, vocab=128256, form="llama", rope_theta=500000.0, context=131072),
    "mistral-7b": Shape(4096, 32, 14336, 32, 8, vocab=32768, form="mistral"),
    "smollm2-135m": Shape(
        576, 30, 1536, 9, 3, vocab=49152, tied=True, head_dim=64, form="llama", rope_theta=100000.0, context=8192
    ),
}


def shape_named(name: str) -> Shape:
    name = name.lower()
    if name not in SHAPES:
        raise ValueError(f"There is no shape {name!r}; known are {', '.join(SHAPES)}.")
    return SHAPES[name]


# Hub ids without -Instruct -> shapes.
HUB_IDS = {
    **{f"Qwen/Qwen2.5-{size}B": f"qwen2.5-{size}b" for size in ("0.5", "1.5", "3", "7", "14", "32")},
    "Qwen/Qwen2.5-Coder-0.5B": "qwen2.5-0.5b",
    **{f"Qwen/Qwen3-{size}B": f"qwen3-{size}b" for size in ("4", "8")},
    "meta-llama/Llama-3.1-8B": "llama-3.1-8b",
    "HuggingFaceTB/SmolLM2-135M": "smollm2-135m",
}
LONGER = {f"Qwen/Qwen2.5-{size}B": 131072 for size in ("1.5", "7", "14", "32")}  # context, but for -Instruct


def shape_of(model: str) -> Shape:
    """The shape of a model without a download: of a folder, of a hub id that is known here or was fetched before."""
    folder = Path(model).expanduser()
    if model == "tiny" and not (folder / "config.json").is_file():
        folder = tiny_model_folder()
    if folder.is_dir():
        return _shape_in(folder)
    if known := HUB_IDS.get(model.removesuffix("-Instruct")):
        return replace(SHAPES[known], context=LONGER.get(model, SHAPES[known].context))
    if fetched := _fetched(model):
        return _shape_in(fetched)
    raise ValueError(
        f"The shape of {model} is not known without a download. Name a folder that holds its config.json, or one of "
        f"{', '.join(HUB_IDS)} (with or without -Instruct)."
    )


def _fetched(model: str) -> Path | None:
    """Where the hub's cache holds config.json of this id, if it does."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _shape_in(folder: Path) -> Shape:
    config = read_config(folder)
    if config.get("model_type") not in SUPPORTED:
        raise ValueError(
            f"{folder} holds a model of type {config.get('model_type')!r}; supported: {', '.join(SUPPORTED)}."
        )
    needed = ("num_attention_heads", "hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")
    if missing := [key for key in needed if key not in config]:
        raise ValueError(f"{folder / 'config.json'} does not say {', '.join(missing)}: is it whole?")
    heads = config["num_attention_heads"]
    return Shape(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        intermediate=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        vocab=config["vocab_size"],
        tied=config.get("tie_word_embeddings", False),
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        form=config["model_type"],
        context=config.get("max_position_embeddings", 32768),
    )
