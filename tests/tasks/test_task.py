"""The registry: every task from local files, or a message that names its hub id; rows made here stand in for data that
is only on the hub."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from qerl.config import Config
from qerl.tasks import math_graders
from qerl.tasks.catalog import BOXED, DATA_SETS, THINK
from qerl.tasks.grader import Grader
from qerl.tasks.shipped import GRADERS
from qerl.tasks.task import Task, load_task, task_named, task_names
from tests.tasks.references import FOLDER

# A row of each data set, with its documented columns; of each split where they differ.
DAPO_TEXT = "Solve this. The last line must be Answer: $Answer.\n\nWhat is 2+3?\n\nRemember to put your answer there."
ROWS: dict[str, dict[str, Any]] = {
    "openai/gsm8k": {"question": "What is 2+3?", "answer": "2+3=<<2+3=5>>5\n#### 5"},
    "DigitalLearningGmbH/MATH-lighteval": {
        **{"problem": "What is 2+3?", "level": "Level 1", "type": "Algebra"},
        "solution": "It is \\boxed{4}, no, \\boxed{5}.",
    },
    "HuggingFaceH4/MATH-500": {"problem": "What is 2+3?", "solution": "\\boxed{5}", "answer": "5", "level": 1},
    "SynthLabsAI/Big-Math-RL-Verified": {
        **{"problem": "What is 2+3?", "answer": "5", "source": "made", "domain": ["sums"], "llama8b_solve_rate": 0.9}
    },
    "BytedTsinghua-SIA/DAPO-Math-17k": {
        **{"data_source": "math_dapo", "ability": "MATH", "extra_info": {"index": "a"}},
        "prompt": [{"role": "user", "content": DAPO_TEXT}],
        "reward_model": {"ground_truth": "5", "style": "rule-lighteval/MATH_v2"},
    },
    "miromind-ai/MiroMind-M1-RL-62K": {"problem": "What is 2+3?", "clean_answer": "5"},
    "HuggingFaceH4/aime_2024": {"id": 1, "problem": "What is 2+3?", "answer": "005", "year": "2024"},
    "math-ai/aime25": {"id": 1, "problem": "What is 2+3?", "answer": "5"},
    "math-ai/amc23": {"id": 1, "question": "What is 2+3?", "answer": 5.0},
    "google-research-datasets/mbpp": {
        **{"task_id": 601, "text": "Write a function to add.", "code": "def add(a, b): return a + b"},
        **{"test_list": ["assert add(2, 3) == 5"], "test_setup_code": "", "challenge_test_list": []},
    },
    "openai/openai_humaneval": {
        **{"task_id": "HumanEval/0", "prompt": "def add(a, b):\n", "canonical_solution": "    return a + b\n"},
        **{"test": "def check(f):\n    assert f(2, 3) == 5\n", "entry_point": "add"},
    },
    "open-r1/verifiable-coding-problems-python": {
        **{"problem_statement": "Read two numbers and print their sum.", "gold_standard_solution": "..."},
        "verification_info": {"language": "python", "test_cases": [{"input": "2 3", "output": "5"}]},
    },
}


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A folder with a file of each data set, under the first of its names."""
    for data in DATA_SETS.values():
        for split, source in (("train", data.train), ("test", data.test)):
            if source is not None:
                row = ROWS[source.hub_id]
                row = row | {"task_id": 11} if data.name == "mbpp" and split == "test" else row
                (tmp_path / f"{source.file_names()[0]}.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    return tmp_path


@pytest.mark.parametrize("name", list(DATA_SETS))
def test_every_data_set_from_local_files(data_dir: Path, name: str) -> None:
    data = DATA_SETS[name]
    task = load_task(name, data_dir=data_dir)
    assert (len(task.train) > 0) == (data.train is not None)
    assert (len(task.test) > 0) == (data.test is not None)
    assert task.rewards
    for row in [*task.train, *task.test]:
        assert row["prompt"][-1]["role"] == "user"
        assert "2+3" in row["prompt"][-1]["content"] or data.answer is None
        if data.answer is not None:
            assert math_graders.accuracy("\\boxed{5}", row) == 1
            assert math_graders.accuracy("\\boxed{4}", row) == 0
        system = [one["content"] for one in row["prompt"] if one["role"] == "system"]
        assert system == ([data.system_prompt] if data.system_prompt else [])


@pytest.mark.parametrize("name", list(DATA_SETS))
def test_every_data_set_says_where_it_would_come_from(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    source = DATA_SETS[name].train or DATA_SETS[name].test
    assert source is not None
    with pytest.raises(ValueError, match=source.hub_id):
        load_task(name, data_dir=tmp_path)


def test_a_hub_id_is_the_registered_task(data_dir: Path) -> None:
    for hub_id in ("openai/gsm8k", "HuggingFaceH4/MATH-500", "open-r1/verifiable-coding-problems-python"):
        task = load_task(hub_id, data_dir=data_dir)
        assert task.rewards
        assert len(task.train) + len(task.test) > 0


def test_system_prompt_and_splits(data_dir: Path) -> None:
    assert load_task("gsm8k", data_dir=data_dir).train[0]["prompt"][0] == {"role": "system", "content": THINK}
    assert load_task("math", data_dir=data_dir).train[0]["prompt"][0]["content"] == BOXED
    own = load_task("gsm8k", data_dir=data_dir, system_prompt="Be short.").test[0]["prompt"]
    assert [message["content"] for message in own] == ["Be short.", "What is 2+3?"]
    assert len(load_task("gsm8k", data_dir=data_dir, system_prompt="").test[0]["prompt"]) == 1
    (data_dir / "math500_test.jsonl").unlink()
    task = load_task("math", data_dir=data_dir, splits=("train",))
    assert len(task.train) == 3
    assert len(task.test) == 0


def test_dapo_keeps_its_prompts_once_and_punishes_length(data_dir: Path) -> None:
    task = load_task("dapo-math-17k", data_dir=data_dir, max_completion_length=10)
    assert len(task.train) == 1
    assert task.train[0]["prompt"] == [{"role": "user", "content": DAPO_TEXT}]
    assert task.train[0]["source_prompt"]
    assert "`Answer: `" in task.test[0]["prompt"][0]["content"]
    assert math_graders.dapo("Answer: 5", task.train[0]) == math_graders.dapo("Answer: 5", task.test[0]) == 1
    overlong = task.rewards[1]
    assert not isinstance(overlong, Grader)
    assert overlong(completion_ids=[[0] * 9, [0] * 8]) == [-0.5, 0]


def test_code_rows_keep_what_their_graders_read(data_dir: Path) -> None:
    row = load_task("humaneval", data_dir=data_dir).test[0]
    assert row["code_prompt"] == "def add(a, b):\n"
    assert {"test", "entry_point"} <= row.keys()
    assert "assert add(2, 3) == 5" in load_task("mbpp", data_dir=data_dir).train[0]["prompt"][-1]["content"]
    assert "verification_info" in load_task("verifiable-coding-problems-python", data_dir=data_dir).train[0]


def test_problems_judged_by_tests_of_a_function_are_left_out(data_dir: Path) -> None:
    row = ROWS["open-r1/verifiable-coding-problems-python"]
    case = {"fn_name": "add", "input": "[2, 3]", "output": "5", "type": "function_call"}
    other = row | {"verification_info": {"language": "python", "test_cases": [case]}}
    path = data_dir / "open-r1__verifiable-coding-problems-python_train.jsonl"
    assert path.exists()
    path.write_text("".join(f"{json.dumps(one)}\n" for one in (row, other, row)))
    assert len(load_task("verifiable-coding-problems-python", data_dir=data_dir).train) == 2


def test_data_that_does_not_fit_is_refused_with_its_row(data_dir: Path) -> None:
    (data_dir / "gsm8k_train.jsonl").write_text('{"question": "a", "answer": "#### 1"}\n' + '{"q": "a"}\n' * 2)
    with pytest.raises(ValueError, match=r"2 rows lack .* row 2 with the columns q\. gsm8k reads: question, answer"):
        load_task("gsm8k", data_dir=data_dir)
    (data_dir / "gsm8k_train.jsonl").write_text('{"question": "a", "answer": "#### 1"}\n' * 2 + '{"question": "b"}\n')
    assert len(load_task("gsm8k", data_dir=data_dir).train) == 2  # a row without an answer is left out


@pytest.mark.parametrize("name", ["gsm8k", "math", "math500", "aime24", "amc23", "mbpp", "humaneval"])
def test_real_files(name: str) -> None:
    if not FOLDER.is_dir():
        pytest.skip("there is no data beside the repository")
    task = load_task(name, data_dir=FOLDER)
    sizes = {"gsm8k": (7473, 1319), "math": (7470, 500), "math500": (0, 500), "aime24": (0, 30), "amc23": (0, 40)}
    assert (len(task.train), len(task.test)) == (sizes | {"mbpp": (374, 500), "humaneval": (0, 164)})[name]
    assert not {str(row["prompt"]) for row in task.train} & {str(row["prompt"]) for row in task.test}


def check_generated(name: str) -> Task:
    task, again, other = (load_task(name, seed=seed, eval_size=20) for seed in (1, 1, 2))
    assert [task.train[i] for i in range(20)] == [again.train[i] for i in range(20)]
    assert [task.train[i] for i in range(20)] != [other.train[i] for i in range(20)]
    assert task.test == other.test
    assert not {str(task.train[i]["prompt"]) for i in range(200)} & {str(row["prompt"]) for row in task.test}
    assert task.train[-1] == task.train[len(task.train) - 1]
    assert task.train[1:3] == [task.train[1], task.train[2]]
    with pytest.raises(IndexError):
        task.train[len(task.train)]
    return task


@pytest.mark.parametrize("name", ["arithmetic", "countdown"])
def test_generated_tasks(name: str) -> None:
    assert len(check_generated(name).test) == 20


@pytest.mark.parametrize("name", ["leg_counting", "basic_arithmetic", "chain_sum"])
def test_reasoning_gym(name: str) -> None:
    pytest.importorskip("reasoning_gym")
    from qerl.tasks import reasoning

    task = check_generated(f"reasoning_gym:{name}")
    for row in task.test:
        assert reasoning.accuracy(f"<think>1</think><answer>{row['answer']}</answer>", row) == 1
        assert reasoning.accuracy("<answer>no idea</answer>", row) < 0.1
        assert reasoning.accuracy(str(row["answer"]), row) == 0
    assert reasoning.accuracy("1", {}) is None


def test_reasoning_gym_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"qerl\[reasoning\]"):
        load_task("reasoning_gym:leg_counting")


def test_an_unknown_generator() -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match=r"no generator 'legs'; it has .*leg_counting"):
        load_task("reasoning_gym:legs")


def test_own_file(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    talk = [{"role": "user", "content": "hi"}]
    path.write_text(json.dumps({"prompt": "a", "x": 1}) + "\n" + json.dumps({"prompt": talk}) + "\n")
    task = load_task(str(path))
    assert list(task.train) == [{"prompt": "a", "x": 1}, {"prompt": talk}]
    assert not task.test
    assert not task.rewards
    with pytest.raises(ValueError, match="row 1: system_prompt needs prompts that are messages"):
        load_task(str(path), system_prompt="x")
    path.write_text(json.dumps({"prompt": talk}) + "\n")
    assert load_task(str(path), system_prompt="x").train[0]["prompt"] == [{"role": "system", "content": "x"}, *talk]
    for row, message in (
        ({"question": "a"}, "row 2: a row needs a `prompt`.*it has question"),
        ({"prompt": ""}, "row 2"),
        ({"prompt": 5}, "row 2"),
        ({"prompt": []}, "row 2"),
        ({"prompt": [{"role": "user"}]}, "row 2: a message of `prompt` needs"),
    ):
        path.write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps(row) + "\n")
        with pytest.raises(ValueError, match=message):
            load_task(str(path))


def test_another_hub_id(tmp_path: Path) -> None:
    (tmp_path / "someone__set_train.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "set_test.jsonl").write_text('{"prompt": "b"}\n')
    task = load_task("someone/set", data_dir=tmp_path)
    assert (list(task.train), list(task.test)) == ([{"prompt": "a"}], [{"prompt": "b"}])


def test_an_unknown_task_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"no task 'gsm9k'. Did you mean gsm8k\? .*countdown.*hub id"):
        load_task("gsm9k")
    for name in ("./mine.csv", "mine.json"):
        with pytest.raises(ValueError, match=r"neither \.jsonl nor \.parquet"):
            load_task(name)
    with pytest.raises(ValueError, match="no file"):
        load_task("nowhere.jsonl")
    assert {"arithmetic", "countdown", "gsm8k", "mbpp"} <= set(task_names())


def test_by_configuration() -> None:
    task = task_named(Config(task="arithmetic", eval_size=0))
    assert not task.test
    with pytest.raises(ValueError, match="drop system_prompt"):
        task_named(Config(system_prompt="x"))


def test_tasks_use_shipped_graders() -> None:
    for data in DATA_SETS.values():
        for reward in data.rewards:
            assert GRADERS[reward.name] == reward
