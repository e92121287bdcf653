"""qerl: reinforcement learning for large language models on 4-bit weights."""

__version__ = "0.1.0"
