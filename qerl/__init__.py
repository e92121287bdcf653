"""qerl: reinforcement learning for large language models on 4-bit weights."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qerl.rl.run import Result

__version__ = "0.1.0"


def train(*args: Any, **kwargs: Any) -> "Result":
    """`qerl.rl.run.train`: train by a configuration, on a task or on your own data and reward functions."""
    from qerl.rl.run import train as run

    return run(*args, **kwargs)
