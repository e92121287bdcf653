"""A grader: a reward that is worked out sample by sample, by an importable function, in a worker process.

The function takes a completion's text and the dataset row that it answers, and returns a number, or None where it does
not apply. It keeps no state, so that any worker may run it, at any time, and a hang or a crash costs one sample. Here
stands only its name and address: nothing is imported until a worker needs it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Grader:
    name: str  # in metrics; one with `accuracy` in it is the accuracy reward
    path: str  # "module:function"
    timeout: float = 5.0  # seconds for a sample
    prepare: str = ""  # "module:function", called once in a worker before its first sample, off the clock
