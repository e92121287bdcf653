"""What a supported model is made of, read from its transformers configuration.

Qwen2 and Qwen2.5, Qwen3, Llama 3.x, Mistral and whatever shares their form are one decoder; their differences are
fields here, not classes.
"""

from dataclasses import dataclass
from typing import Any

# model_type -> what the family is called
SUPPORTED = {"qwen2": "Qwen2 and Qwen2.5", "qwen3": "Qwen3", "llama": "Llama 3.x (and SmolLM2)", "mistral": "Mistral"}

QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")
PROJECTIONS = (*QKV, "o_proj", *GATE_UP, "down_proj")


@dataclass(frozen=True)
class Architecture:
    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    norm_eps: float
    tied: bool  # the head is the embedding
    qk_norm: bool  # RMSNorm on each head of q and k (Qwen3)
    biased: frozenset[str]  # projections with a bias
    windows: tuple[int | None, ...]  # of each layer: how many tokens attention sees, None for all
    rope: dict[str, Any]  # transformers' rope_parameters
    max_positions: int

    def outputs(self, projection: str) -> int:
        """Outputs (N) of one of the seven projections."""
        return {
            "q_proj": self.heads * self.head_dim,
            "k_proj": self.kv_heads * self.head_dim,
            "v_proj": self.kv_heads * self.head_dim,
            "o_proj": self.hidden,
            "gate_proj": self.intermediate,
            "up_proj": self.intermediate,
            "down_proj": self.hidden,
        }[projection]

    def inputs(self, projection: str) -> int:
        """Inputs (K) of one of the seven projections."""
        if projection == "o_proj":
            return self.heads * self.head_dim
        return self.intermediate if projection == "down_proj" else self.hidden


def architecture_of(config: Any) -> Architecture:
    """From a transformers configuration object. What is not supported is refused by name."""
    kind = config.model_type
    if kind not in SUPPORTED:
        known = ", ".join(f"{name} ({kind})" for kind, name in SUPPORTED.items())
        raise ValueError(f"Models of type {kind!r} are not supported. Supported are {known}.")
    if config.hidden_act != "silu":
        raise ValueError(f"Activation {config.hidden_act!r} is not supported; the supported families use silu.")
    if config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("Rotary embedding on a part of each head (partial_rotary_factor) is not supported.")
    biased: set[str] = set(QKV) if kind == "qwen2" else set()
    if getattr(config, "attention_bias", False):
        biased |= {*QKV, "o_proj"}
    if getattr(config, "mlp_bias", False):
        biased |= {*GATE_UP, "down_proj"}
    return Architecture(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocab=config.vocab_size,
        norm_eps=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
        qk_norm=kind == "qwen3",
        biased=frozenset(biased),
        windows=_windows(config),
        rope=_rope(config),
        max_positions=config.max_position_embeddings,
    )


def _rope(config: Any) -> dict[str, Any]:
    rope = dict(config.rope_parameters)
    if original := getattr(config, "original_max_position_embeddings", None):  # the model's own word counts first
        rope["original_max_position_embeddings"] = original
    return rope


def _windows(config: Any) -> tuple[int | None, ...]:
    window: int | None = getattr(config, "sliding_window", None)
    layers: int = config.num_hidden_layers
    odd = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if odd:
        raise ValueError(f"Layers of type {', '.join(sorted(odd))} are not supported, only full and sliding attention.")
    if window is None:
        return (None,) * layers
    if window < 1:
        raise ValueError(
            f"A sliding window of {window} tokens makes no sense; config.json must say null or 1 and more."
        )
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # Mistral: all layers
        return (window,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
