"""Every family and variant that the decoder claims, as (family, changes to the tiny configuration)."""

from typing import Any

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen2-yarn-own-context": (
        "qwen2",
        {"rope_parameters": YARN, "original_max_position_embeddings": 16},
    ),
    "qwen2-sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-biased": ("qwen3", {"attention_bias": True}),
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": ("llama", {"rope_parameters": LINEAR}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "smollm2-form": ("llama", {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 96}),
    "mistral": ("mistral", {}),
    "mistral-sliding": ("mistral", {"sliding_window": 5}),
}
