r"""The registered data sets: where their rows are, how a row becomes a prompt, and what a completion earns.

Each is named once here, and training and evaluation read the same. A row of a task has `prompt` (messages), for
mathematics an `answer`, and all columns that the data set had; a column of its own that is called `prompt` is kept
under another name. Columns are those that the data sets document. None but GSM8K, MATH, MATH-500, AIME 2024, AMC 2023,
MBPP and HumanEval was at hand when this was written: the others are tested on rows made by hand.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from qerl.tasks.code import stdin_stdout_cases
from qerl.tasks.extract import boxed
from qerl.tasks.grader import Grader
from qerl.tasks.math_graders import right_answer
from qerl.tasks.shipped import DAPO, GSM8K, HUMANEVAL, MATH, MBPP, PROGRAMS
from qerl.tasks.source import HubSplit, Row

THINK = (
    "You solve problems. First think the problem through between <think> and </think>, step by step. Then give only "
    "the final answer between <answer> and </answer>."
)
BOXED = "Reason step by step, and put your final answer into \\boxed{}."
CODE = (
    "You write Python programs. Think the problem through, then give the whole program in one block that begins with "
    "```python and ends with ```."
)
ANSWER_LINE = (
    "Solve this problem step by step. The last line of your reply must be `Answer: ` and after it the answer alone.\n\n"
    "{question}"
)


@dataclass(frozen=True)
class DataSet:
    """A registered data set. `question` and `answer` find these in a raw row, None where the row has none; a row
    without a question, or without an answer where there should be one, is left out."""

    name: str
    columns: str  # what the data set documents
    train: HubSplit | None
    test: HubSplit | None
    question: Callable[[Row], str | None]
    rewards: tuple[Grader, ...]
    answer: Callable[[Row], str | None] | None = None
    template: str = "{question}"
    system_prompt: str = ""
    keep: dict[str, Callable[[Row], bool]] = field(default_factory=dict)  # by split: rows of a file that holds several
    overlong: bool = False  # soft overlong punishment besides
    distinct: bool = False  # the same question once
    kept_prompt: str = "source_prompt"  # a column `prompt` of the data set goes on under this name
    train_rows: int | None = None  # on the hub, for plans made without a download


def column(*names: str) -> Callable[[Row], str | None]:
    """The first of these columns that a row has, as text."""

    def find(row: Row) -> str | None:
        return next((str(row[name]) for name in names if row.get(name) not in (None, "")), None)

    return find


_PROBLEM = column("problem", "question")


def math_answer(row: Row) -> str | None:
    """`answer`, else what stands in the last box of `solution`."""
    if (right := right_answer(row)) is not None or "solution" not in row:
        return right
    box = boxed(str(row["solution"]))
    return box[1] if box else None


def renamed_answer(*names: str) -> Callable[[Row], str | None]:
    find = column(*names)
    return lambda row: right_answer({"answer": find(row)})


def dapo_question(row: Row) -> str | None:
    """The last user message of `prompt`, which brings its own instructions; or a plain question, with ours."""
    prompt = row.get("prompt")
    if prompt is None or isinstance(prompt, str):
        question = prompt or _PROBLEM(row)
        return ANSWER_LINE.format(question=question) if question else None
    asked = [message["content"] for message in prompt if message.get("role") == "user"]
    return asked[-1] if asked else None


def dapo_answer(row: Row) -> str | None:
    reward: Any = row.get("reward_model")
    return right_answer({"answer": reward.get("ground_truth")}) if isinstance(reward, dict) else right_answer(row)


def mbpp_question(row: Row) -> str | None:
    """The task, with its tests: they alone say what the function is called. The sanitized subset calls it `prompt`."""
    text, tests = row.get("text") or row.get("prompt"), row.get("test_list")
    return f"{text}\nYour code must pass these tests:\n\n" + "\n".join(tests) if text and tests else None


def humaneval_question(row: Row) -> str | None:
    head = row.get("prompt")
    return f"Complete this function, and repeat its head and imports:\n\n```python\n{head}```" if head else None


def program_question(row: Row) -> str | None:
    """Problems that are judged by what a program prints; a few of these data are judged by tests of a function."""
    return column("problem_statement", "problem")(row) if stdin_stdout_cases(row) is not None else None


def _ids(first: int, last: int) -> Callable[[Row], bool]:
    return lambda row: first <= int(row.get("task_id", first)) <= last


MATH500 = HubSplit("HuggingFaceH4/MATH-500", "test", files=("math500_test",))
AIME24 = HubSplit("HuggingFaceH4/aime_2024", "train", files=("aime24_test",))
AIME25 = HubSplit("math-ai/aime25", "test", files=("aime25_test",))
AMC23 = HubSplit("math-ai/amc23", "test", files=("amc23_test",))

DATA_SETS = {
    one.name: one
    for one in (
        DataSet(
            name="gsm8k",
            train_rows=7_473,
            columns="question, answer (a solution that ends in `#### N`)",
            train=HubSplit("openai/gsm8k", "train", "main", ("gsm8k_train",)),
            test=HubSplit("openai/gsm8k", "test", "main", ("gsm8k_test",)),
            question=column("question"),
            answer=right_answer,
            system_prompt=THINK,
            rewards=(GSM8K,),
        ),
        DataSet(  # 7500 rows on the hub, none of which is in MATH-500
            name="math",
            train_rows=7_500,
            columns="problem, solution (its last box is the answer), level, type; a local file may have answer",
            train=HubSplit("DigitalLearningGmbH/MATH-lighteval", "train", "default", ("math_train",)),
            test=MATH500,
            question=_PROBLEM,
            answer=math_answer,
            system_prompt=BOXED,
            rewards=(MATH,),
        ),
        DataSet(  # gated: accept its terms on the hub first
            name="bigmath",
            train_rows=251_122,
            columns="problem, answer, source, domain, llama8b_solve_rate",
            train=HubSplit("SynthLabsAI/Big-Math-RL-Verified", "train", files=("bigmath_train",)),
            test=MATH500,
            question=_PROBLEM,
            answer=math_answer,
            system_prompt=THINK,
            rewards=(MATH,),
        ),
        DataSet(  # on the hub every problem stands there about a hundred times
            name="dapo-math-17k",
            train_rows=17_398,
            columns="data_source, prompt (messages with instructions), ability, reward_model.ground_truth, extra_info",
            train=HubSplit("BytedTsinghua-SIA/DAPO-Math-17k", "train", files=("dapo-math-17k_train", "dapo-math-17k")),
            test=AIME24,
            question=dapo_question,
            answer=dapo_answer,
            rewards=(DAPO,),
            overlong=True,
            distinct=True,
        ),
        DataSet(  # columns as its users' scripts read them
            name="miromind",
            columns="problem, clean_answer, ...",
            train=HubSplit("miromind-ai/MiroMind-M1-RL-62K", "train", files=("miromind_train",)),
            test=MATH500,
            question=_PROBLEM,
            answer=renamed_answer("clean_answer", "answer"),
            system_prompt=BOXED,
            rewards=(MATH,),
        ),
        DataSet(
            name="math500",
            columns="problem, solution, answer, subject, level, unique_id",
            train=None,
            test=MATH500,
            question=_PROBLEM,
            answer=math_answer,
            system_prompt=BOXED,
            rewards=(MATH,),
        ),
        DataSet(
            name="aime24",
            columns="id, problem, solution, answer, url, year",
            train=None,
            test=AIME24,
            question=_PROBLEM,
            answer=right_answer,
            system_prompt=BOXED,
            rewards=(MATH,),
        ),
        DataSet(
            name="aime25",
            columns="problem, answer, id",
            train=None,
            test=AIME25,
            question=_PROBLEM,
            answer=right_answer,
            system_prompt=BOXED,
            rewards=(MATH,),
        ),
        DataSet(
            name="amc23",
            columns="id, question (or problem), answer, url",
            train=None,
            test=AMC23,
            question=_PROBLEM,
            answer=right_answer,
            system_prompt=BOXED,
            rewards=(MATH,),
        ),
        DataSet(  # a local mbpp.jsonl holds all 974; the splits go by task_id, as their authors made them
            name="mbpp",
            train_rows=374,
            columns="task_id, text, code, test_list, test_setup_code, challenge_test_list",
            train=HubSplit("google-research-datasets/mbpp", "train", "full", ("mbpp_train", "mbpp")),
            test=HubSplit("google-research-datasets/mbpp", "test", "full", ("mbpp_test", "mbpp")),
            question=mbpp_question,
            system_prompt=CODE,
            rewards=(MBPP,),
            keep={"train": _ids(601, 974), "test": _ids(11, 510)},
        ),
        DataSet(
            name="humaneval",
            columns="task_id, prompt (the function's head), canonical_solution, test, entry_point",
            train=None,
            test=HubSplit("openai/openai_humaneval", "test", files=("humaneval_test", "humaneval")),
            question=humaneval_question,
            system_prompt=CODE,
            rewards=(HUMANEVAL,),
            kept_prompt="code_prompt",
        ),
        DataSet(
            name="verifiable-coding-problems-python",
            columns="problem_statement, verification_info (language, test_cases), gold_standard_solution, source, "
            "task_type, in_source_id, problem_id, metadata",
            train_rows=35_735,
            train=HubSplit("open-r1/verifiable-coding-problems-python", "train"),
            test=None,
            question=program_question,
            system_prompt=CODE,
            rewards=(PROGRAMS,),
        ),
    )
}
