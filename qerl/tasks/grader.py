"""A grader: a function that scores one completion, named so that a worker process can import it.

It is called as `f(text, row)` with the completion's text and its dataset row, and returns a number, or None where it
does not apply. It must be pure: workers call it in any order, in any process.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Grader:
    name: str
    path: str  # "module:function"
    timeout: float = 5.0  # seconds a sample
