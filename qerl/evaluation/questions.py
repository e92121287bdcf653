"""The questions of a task: its held-out rows, and the one reward that says whether an answer is right."""

from collections.abc import Sequence
from dataclasses import dataclass

from qerl.evaluation.answers import PROGRAM_GRADERS
from qerl.evaluation.job import Job
from qerl.tasks.programs import program_rows, runs_programs
from qerl.tasks.rewards import Rewards, reward_name
from qerl.tasks.shipped import Reward, reward_named
from qerl.tasks.source import SUFFIXES, Row
from qerl.tasks.task import Task, load_task

GENERATED = 256  # questions of a generated task, where there is no limit


@dataclass(frozen=True)
class Questions:
    task: str
    rows: Sequence[Row]
    reward: Reward

    @property
    def votes(self) -> bool:
        """Whether samples can agree on an answer."""
        return reward_name(self.reward) not in PROGRAM_GRADERS


def load_questions(job: Job, name: str) -> Questions:
    """The same rows, prompts and grader as in training's evaluation. A file of one's own is all held out."""
    task = load_task(
        name,
        data_dir=job.data_dir,
        system_prompt=job.system_prompt,
        eval_size=job.limit or GENERATED,
        max_completion_length=job.max_tokens,
        splits=("test",),
    )
    rows = task.train if name.endswith(SUFFIXES) else task.test
    if not len(rows):
        raise ValueError(f"The task {name} has no held-out questions.")
    reward = _reward(job, name, task)
    rows = [dict(rows[i]) for i in range(min(len(rows), job.limit or len(rows)))]
    return Questions(name, program_rows(rows, job.unsafe_code) if runs_programs([reward]) else rows, reward)


def _reward(job: Job, name: str, task: Task) -> Reward:
    if job.reward is not None:
        return reward_named(job.reward, {}, job.max_tokens)
    if not task.rewards:
        raise ValueError(f"The task {name} brings no reward: name one with --reward, such as --reward math_accuracy.")
    names = Rewards(task.rewards)
    return task.rewards[names.accuracy_index() or 0]
