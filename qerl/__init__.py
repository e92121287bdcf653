"""qerl: reinforcement learning for large language models on 4-bit weights."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qerl.rl.run import Result

__version__ = "0.1.0"


def train(
    config: Any = None,
    reward_funcs: Any = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    resume: bool = False,
) -> "Result":
    """Train by a configuration, on a task or on your own data and reward functions. See `qerl.rl.run.train`."""
    from qerl.rl.run import train as run

    return run(config, reward_funcs, train_dataset, eval_dataset, resume)
