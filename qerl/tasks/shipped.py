"""The rewards that come with qerl, by the names that `reward_funcs` takes and metrics carry."""

import difflib
from collections.abc import Callable, Mapping

from qerl.tasks import shaping
from qerl.tasks.grader import Grader
from qerl.tasks.rewards import RewardFunction, import_reward

Reward = RewardFunction | Grader

SYMPY = "qerl.tasks.math_answer:prepare"  # slow to load: workers do it before their first sample
MATH = Grader("math_accuracy", "qerl.tasks.math_graders:accuracy", prepare=SYMPY)
GSM8K = Grader("gsm8k_accuracy", "qerl.tasks.math_graders:gsm8k", prepare=SYMPY)
DAPO = Grader("dapo_score", "qerl.tasks.math_graders:dapo", prepare=SYMPY)
COUNTDOWN = Grader("countdown_accuracy", "qerl.tasks.countdown:accuracy")
REASONING = Grader("reasoning_accuracy", "qerl.tasks.reasoning:accuracy")
MBPP = Grader("mbpp_accuracy", "qerl.tasks.code:mbpp", timeout=30.0)
HUMANEVAL = Grader("humaneval_accuracy", "qerl.tasks.code:humaneval", timeout=30.0)
PROGRAMS = Grader("program_accuracy", "qerl.tasks.code:stdin_stdout", timeout=60.0)
THINK_FORMAT = Grader("think_format", "qerl.tasks.think_format:soft")
THINK_FORMAT_STRICT = Grader("think_format_strict", "qerl.tasks.think_format:strict")
REPETITION = Grader("repetition", "qerl.tasks.shaping:repetition")

GRADERS = {
    one.name: one
    for one in (
        *(MATH, GSM8K, DAPO, COUNTDOWN, REASONING, MBPP, HUMANEVAL, PROGRAMS),
        *(THINK_FORMAT, THINK_FORMAT_STRICT, REPETITION),
    )
}
# Made for a run's max_completion_length.
BY_LENGTH: dict[str, Callable[[int], RewardFunction]] = {
    "soft_overlong": shaping.soft_overlong,
    "length": shaping.length,
}


def reward_named(
    name: str, own: Mapping[str, Reward], max_completion_length: int, timeout: float | None = None
) -> Reward:
    """A reward by its name: the task's own, a shipped one, or a user's by its import path (timeout: of such a grader,
    for each sample)."""
    if name in own:
        return own[name]
    if name in BY_LENGTH:
        return BY_LENGTH[name](max_completion_length)
    if name in GRADERS:
        return GRADERS[name]
    if "." in name or ":" in name:
        return import_reward(name, timeout)
    known = [*own, *GRADERS, *BY_LENGTH]
    near = difflib.get_close_matches(name, known, 1)
    raise ValueError(
        f"There is no reward {name!r}.{f' Did you mean {near[0]}?' if near else ''} There are "
        f"{', '.join(dict.fromkeys(known))}; your own is written module.function, or module:function for the workers."
    )
