"""TRL's reward contract."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qerl.tasks.grader import Grader
from qerl.tasks.rewards import Rewards, TrainerState, import_reward
from qerl.tasks.workers import Workers

ROWS = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
STATE = TrainerState(global_step=3, max_steps=10)


def score(*functions, rows=ROWS, texts=("1", "3")):
    return Rewards(functions).score(rows, texts, [(1,), (3, 4)], STATE)


def test_a_function_gets_columns_and_the_names_it_wants() -> None:
    seen = {}

    def everything(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **kwargs):
        seen.update(kwargs, prompts=prompts, completions=completions, ids=completion_ids, state=trainer_state)
        log_extra("parsed", ["x", "y"])
        log_metric("mean_length", 1.5)
        return [0.0, 1.0]

    def little(completions, answer):
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    def none_applies(completions, **kwargs):
        return [None, 2]

    scores = score(everything, little, none_applies)
    assert seen == {
        "answer": ["1", "2"],
        "prompts": ["a", "b"],
        "completions": ["1", "3"],
        "ids": [[1], [3, 4]],
        "state": STATE,
    }
    assert scores.values[:2] == [[0.0, 1.0], [1.0, 0.0]]
    assert scores.values[2][0] != scores.values[2][0]  # NaN
    assert scores.values[2][1] == 2.0
    assert scores.extra == {"parsed": ["x", "y"]}
    assert scores.metrics == {"mean_length": [1.5]}


@pytest.mark.parametrize("count", [1, 3])
def test_a_logged_column_has_a_value_for_each_completion(count: int) -> None:
    def logs(completions, log_extra):
        log_extra("parsed", ["x"] * count)
        return [0.0, 1.0]

    with pytest.raises(ValueError, match=rf"logs raised ValueError: log_extra\('parsed'\) got {count} values for 2"):
        score(logs)


def test_conversational_prompts_give_completions_as_messages() -> None:
    rows = [{"prompt": [{"role": "user", "content": "hi"}]}]

    def length(completions, **kwargs):
        return [len(completion[0]["content"]) for completion in completions]

    assert Rewards([length]).score(rows, ["hello"], [(1,)], STATE).values == [[5.0]]


def test_async_functions_are_awaited_together() -> None:
    running, most = [0], [0]

    def make(name: str):
        async def reward(completions, **kwargs):
            running[0] += 1
            most[0] = max(most[0], running[0])
            await asyncio.sleep(0.01)
            running[0] -= 1
            return [1.0] * len(completions)

        reward.__name__ = name
        return reward

    def plain(completions, **kwargs):
        return [2.0] * len(completions)

    assert score(make("one"), plain, make("two")).values == [[1.0, 1.0], [2.0, 2.0], [1.0, 1.0]]
    assert most[0] == 2


def test_what_breaks_the_contract_is_refused_by_name() -> None:
    def short(completions, **kwargs):
        return [1.0]

    def words(completions, **kwargs):
        return None

    def infinite(completions, **kwargs):
        return [float("inf"), 0.0]

    def greedy(completions, solution):
        return [0.0, 0.0]

    def texts(completions, **kwargs):
        return [0.5, "0.5"]

    def undefined(completions, **kwargs):
        return [None, float("nan")]

    def broken(completions, **kwargs):
        return [{"1": 1.0}[completion] for completion in completions]

    async def late(completions, **kwargs):
        await asyncio.sleep(0)
        return broken(completions)

    for function, message in (
        (short, "short returned 1 rewards for 2"),
        (words, "words must return a list"),
        (infinite, "infinite returned an infinite"),
        (greedy, "greedy asks for solution; there are answer"),
        (texts, "texts returned '0.5', where a number"),
        (undefined, "undefined returned NaN"),
        (broken, r"broken raised KeyError: '3'\s+\S+test_rewards.py, line \d+, in broken"),
        (late, r"late raised KeyError: '3'\s+\S+test_rewards.py, line \d+, in late\s+\S+, line \d+, in broken"),
    ):
        with pytest.raises(ValueError, match=message):
            score(function)
    with pytest.raises(ValueError, match="no reward function"):
        Rewards([])
    with pytest.raises(ValueError, match="same name"):
        Rewards([short, short])
    with pytest.raises(ValueError, match="2 reward_weights for 1"):
        Rewards([short], [1.0, 2.0])


def test_graders_and_functions_side_by_side() -> None:
    def plain(completions, **kwargs):
        return [9.0] * len(completions)

    echo = Grader("echo", "tests.tasks.graders:echo", timeout=2.0)
    texts = ["1.5", "none", "loop", "exit", "raise", "3"]
    rows = [{"prompt": "p"}] * len(texts)
    ids = [(1,)] * len(texts)
    with Workers(2) as workers:
        rewards = Rewards([echo, plain], workers=workers)
        together = rewards.score(rows, texts, ids, STATE)
        for key, (row, text) in enumerate(zip(rows, texts, strict=True)):  # begun early, in another order
            rewards.begin(("key", key), row, text)
        early = rewards.score(rows, texts, ids, STATE, [("key", i) for i in range(len(texts))])
    for scores in (together, early):
        assert [str(value) for value in scores.values[0]] == ["1.5", "nan", "0.0", "0.0", "0.0", "3.0"]
        assert scores.values[1] == [9.0] * 6
        assert scores.failures == {"timeout": 1, "crash": 1, "error": 1}


def test_a_call_that_takes_too_long_is_given_up() -> None:
    def slow(completions, **kwargs):
        time.sleep(1.0)
        return [0.0] * len(completions)

    with pytest.raises(ValueError, match=r"slow took longer than reward_timeout=0\.1 s"):
        Rewards([slow], timeout=0.1).score(ROWS, ("1", "2"), [(1,), (2,)], STATE)
    assert Rewards([slow], timeout=30).score(ROWS, ("1", "2"), [(1,), (2,)], STATE).values == [[0.0, 0.0]]


HANGING = """
import asyncio, time
from qerl.tasks.rewards import Rewards, TrainerState
def hang(completions, **kwargs): time.sleep(1000)
async def wait(completions, **kwargs): await asyncio.sleep(1000)
for function in (hang, wait):
    try: Rewards([function], timeout=0.1).score([{"prompt": "p"}], ["c"], [(1,)], TrainerState(0, 1))
    except ValueError as error: print(error)
"""


def test_a_function_that_never_returns_does_not_keep_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.count("took longer than") == 2


def test_a_functions_own_timeout_is_not_mistaken_for_the_calls() -> None:
    def offline(completions, **kwargs):
        raise TimeoutError("the judge does not answer")

    with pytest.raises(ValueError, match="offline raised TimeoutError: the judge does not answer"):
        Rewards([offline], timeout=60).score(ROWS, ("1", "2"), [(1,), (2,)], STATE)


def test_the_accuracy_reward_is_found_by_name() -> None:
    def format_reward(completions, **kwargs): ...
    def accuracy_reward(completions, **kwargs): ...

    rewards = Rewards([format_reward, accuracy_reward])
    assert rewards.accuracy_index() == 1
    assert rewards.accuracy_index("format_reward") == 0
    assert Rewards([format_reward]).accuracy_index() is None
    with pytest.raises(ValueError, match="no reward function 'acc'"):
        rewards.accuracy_index("acc")


def test_functions_by_import_path() -> None:
    assert import_reward("tests.tasks.test_rewards.score") is score
    assert import_reward("tests.tasks.graders:echo") == Grader("echo", "tests.tasks.graders:echo")
    assert import_reward("tests.tasks.graders:echo", 0.5) == Grader("echo", "tests.tasks.graders:echo", 0.5)
    for path, message in (
        ("tests.nothing.f", "can't be imported: ModuleNotFoundError(.|\\n)*PYTHONPATH"),
        ("qerl.__version__", "is not a function"),
        ("tests/tasks/graders.py:echo", "is a file; name it as Python imports it: graders.FUNCTION, or graders:FUN"),
        ("./graders.py", "name it as Python imports it: graders.FUNCTION"),
    ):
        with pytest.raises(ValueError, match=message):
            import_reward(path)


def test_a_module_that_fails_and_a_function_of_lists_in_place_of_a_grader_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "fails_at_once.py").write_text("table = {}\ntable['x']\n")
    (tmp_path / "bad_syntax.py").write_text("def f(:\n")
    (tmp_path / "lists.py").write_text("def one(completions, **k): ...\ndef two(completions, answer, **k): ...\n")
    for path, message in (
        ("fails_at_once.f", r"KeyError: 'x'\s+\S+fails_at_once.py, line 2"),
        ("bad_syntax.f", r"SyntaxError: .*bad_syntax.py, line 1"),
        ("lists:one", r"a function of lists .* is written lists\.one"),
        ("lists:two", r"lists:two takes \(completions, answer"),
    ):
        with pytest.raises(ValueError, match=f"(?i){message}"):
            import_reward(path)
