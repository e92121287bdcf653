"""Shapes of public models by name: enough to know every tensor without a download.

Figures are those of the models' published config.json files.
"""

from dataclasses import dataclass
from typing import Any

import torch

from qerl.quant.safetensors_io import Spec


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
            "max_position_embeddings": 32768,
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
    "tiny": Shape(256, 4, 768, 4, 2, vocab=4096, tied=True, head_dim=64),
    "qwen2.5-0.5b": Shape(896, 24, 4864, 14, 2, tied=True, head_dim=64),
    "qwen2.5-1.5b": Shape(1536, 28, 8960, 12, 2, tied=True),
    "qwen2.5-3b": Shape(2048, 36, 11008, 16, 2, tied=True),
    "qwen2.5-7b": Shape(3584, 28, 18944, 28, 4, vocab=152064),
    "qwen2.5-14b": Shape(5120, 48, 13824, 40, 8, vocab=152064),
    "qwen2.5-32b": Shape(5120, 64, 27648, 40, 8, vocab=152064),
    "qwen3-4b": Shape(2560, 36, 9728, 32, 8, tied=True, form="qwen3"),
    "qwen3-8b": Shape(4096, 36, 12288, 32, 8, form="qwen3"),
    "llama-3.1-8b": Shape(4096, 32, 14336, 32, 8, vocab=128256, form="llama", rope_theta=500000.0),
    "mistral-7b": Shape(4096, 32, 14336, 32, 8, vocab=32768, form="mistral"),
    "smollm2-135m": Shape(576, 30, 1536, 9, 3, vocab=49152, tied=True, head_dim=64, form="llama", rope_theta=100000.0),
}


def shape_named(name: str) -> Shape:
    name = name.lower()
    if name not in SHAPES:
        raise ValueError(f"There is no shape {name!r}; known are {', '.join(SHAPES)}.")
    return SHAPES[name]
