"""The answer in a completion, as its grader reads it; what samples vote with."""

from collections.abc import Callable

from qerl.tasks.code import extract_code
from qerl.tasks.extract import extract
from qerl.tasks.math_graders import dapo_answer, gsm8k_answer
from qerl.tasks.shipped import DAPO, GSM8K, HUMANEVAL, MBPP, PROGRAMS

PROGRAM_GRADERS = (MBPP.name, HUMANEVAL.name, PROGRAMS.name)  # two programs are hardly ever the same: no vote

_READERS: dict[str, Callable[[str], str | None]] = {
    GSM8K.name: gsm8k_answer,
    DAPO.name: dapo_answer,
    **dict.fromkeys(PROGRAM_GRADERS, extract_code),
}


def given_answer(reward: str, text: str) -> str | None:
    """What the reward of this name takes for the answer; for one that is not ours, what stands in the usual forms."""
    return _READERS.get(reward, extract)(text)
