"""A decoder of 2.4 million parameters that comes with the package, for a first RL run on a CPU. See `make`."""

from pathlib import Path


def tiny_model_folder() -> Path:
    """The folder of the shipped model: configuration, bf16 weights and tokenizer as transformers writes them."""
    return Path(__file__).parent / "checkpoint"
