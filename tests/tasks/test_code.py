"""Code graders: references score 1, altered ones 0, and no trick scores 1."""

import ast
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from qerl.tasks import sandbox, shipped, trial
from qerl.tasks.code import extract_code, humaneval, mbpp, stdin_stdout
from qerl.tasks.sandbox import sandbox_available

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the data sets are not here")
needs_sandbox = pytest.mark.skipif(sandbox_available() is not None, reason="no sandbox here")

SQUARE = {"test_list": ["assert square(3) == 9", "assert square(-2) == 4"]}
CHECK = "def check(candidate):\n    assert candidate(3) == 9\n    assert candidate(-2) == 4\n"
SQUARE_PROMPT = 'from math import floor\n\ndef square(x: int) -> int:\n    """The square."""\n'
SQUARE_ROW = {"prompt": SQUARE_PROMPT, "test": CHECK, "entry_point": "square"}

TRICKS = {
    "exit": "import os\nos._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "exit in the function": "import os\ndef square(x): os._exit(0)",
    "equal to all": "class A:\n    def __eq__(self, other): return True\ndef square(x): return A()",
    "int equal to all": "class A(int):\n    def __eq__(self, other): return True\ndef square(x): return A(5)",
    "builtins": "import builtins\nbuiltins.abs = builtins.AssertionError = None\ndef square(x): return 0",
    "atexit": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef square(x): return 0",
    "frames": """
import gc, sys, os
frame = sys._getframe()
while frame:
    for name in ("token", "tests"):
        if name in frame.f_locals or name in frame.f_globals: os.write(1, str(frame.f_locals).encode())
    frame = frame.f_back
def square(x): return 0
""",
    "all files": """
import os
for file in range(64):
    for text in (b"passed", b"0" * 32):
        try: os.write(file, text)
        except OSError: pass
def square(x): return 0
""",
    "fake replies": """
import os
for _ in range(100): os.write(5, b'{"result": true}\\n')
def square(x): return 0
""",
    "handles": """
import os
os.write(5, b'{"result": {"handle": {"__eq__": 1}}}\\n{"result": {"name": "token"}}\\n')
""",
    "its own assert": "def square(x): raise SystemExit(0)",
    "no answer": "def square(x): return None",
    "nothing": "",
    "deep reply": "import os\nos.write(5, b'{\"result\": ' + b'[' * 100000 + b'\\n')\ndef square(x): return 0",
}


def rows(name: str) -> list[dict[str, Any]]:
    with open(DATA / f"{name}.jsonl") as file:
        return [json.loads(line) for line in file]


def altered(tests: list[str]) -> list[str]:
    """The same assertions, with the last turned round."""
    tree = ast.parse(tests[-1])
    (statement,) = tree.body
    assert isinstance(statement, ast.Assert)
    return [*tests[:-1], f"assert not ({ast.unparse(statement.test)})"]


def grade_all(grader: Any, samples: list[tuple[str, dict[str, Any]]]) -> list[float | None]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda sample: grader(*sample), samples))


def test_code_is_the_last_python_block():
    assert extract_code("def f(): pass") == "def f(): pass"
    assert extract_code("a\n```python\n1\n```\nb\n```py\n2\n```\n") == "2\n"
    assert extract_code("```python\n1\n```\nprints\n```\nout\n```") == "1\n"
    assert extract_code("```\n1\n```\n```text\n2\n```") == "1\n"
    assert extract_code("so:\n```python\nx = '''\n") == "x = '''\n"
    assert extract_code("```Python\nx = '```'\n```") == "x = '```'\n"
    assert extract_code("use `x` or ```y```") == "use `x` or ```y```"


@pytest.mark.parametrize("value", [
    None, True, 3, -(2**100), 0.1, "ä\ud800", [1, [2]], (1, (2, [])), {1, 2}, frozenset({(1, 2)}), {(1, 2): {"a": 1}},
    b"x", 1 + 2j, range(3), int, float("inf"),
])  # fmt: skip
def test_plain_data_travels_unchanged(value: Any):
    def refuse(*arguments: Any) -> Any:
        raise TypeError(arguments)

    sent = json.loads(json.dumps(trial.encode(value, refuse)))
    back = trial.decode(sent, refuse)
    assert back == value
    assert type(back) is type(value)


def test_names_to_ask_for():
    assert trial.names_to_ask_for("assert set(f(x=1)) == set([1])") == {"f"}
    assert trial.names_to_ask_for("import math as m\nassert m.isclose(f(1), math.pi)") == {"f"}
    assert trial.names_to_ask_for("root = Node(1)\nassert all(f(r) for r in [root])") == {"f", "Node"}
    assert trial.names_to_ask_for("assert sum(10, 15) == 6") == {"sum"}


@needs_sandbox
def test_right_and_wrong_functions():
    right = "Here:\n```python\ndef square(x):\n    print('hello')\n    return x * x\n```\nDone."
    wrong = right.replace("x * x", "9")
    assert mbpp(right, SQUARE) == 1.0
    assert mbpp(wrong, SQUARE) == 0.0
    assert humaneval(right, SQUARE_ROW) == 1.0
    assert humaneval(wrong, SQUARE_ROW) == 0.0
    assert humaneval("    return floor(x) ** 2\n", SQUARE_ROW) == 1.0
    assert humaneval("```python\n    return x + 1\n```", SQUARE_ROW) == 0.0
    assert humaneval("    return x * x", SQUARE_ROW | {"prompt": [{}], "code_prompt": SQUARE_PROMPT}) == 1.0
    assert mbpp(right, {}) is None
    assert humaneval(right, {"prompt": "x"}) is None


@needs_sandbox
def test_no_trick_passes():
    samples = [(f"```python\n{source}\n```", SQUARE) for source in TRICKS.values()]
    scores = dict(zip(TRICKS, grade_all(mbpp, samples), strict=True))
    assert scores == dict.fromkeys(TRICKS, 0.0)


@needs_sandbox
def test_names_that_the_tests_use_stay_theirs():
    row = {"test_list": ["assert set(f([1, 2, 2])) == set([1, 2])", "assert abs(g()) == 3"]}
    cheat = "def set(x): return 0\ndef abs(x): return 3\ndef f(x): return []\ndef g(): return 0"
    assert mbpp(cheat, row) == 0.0
    helper = "def twice(x):\n    return 2 * x\n\ndef solve(x):\n    '''Half of x.'''\n"
    test = "def check(candidate):\n    assert twice(candidate(4)) == 4\n"
    row = {"prompt": helper, "test": test, "entry_point": "solve"}
    assert humaneval("    return x / 2", row) == 1.0
    assert humaneval("def twice(x): return 4\ndef solve(x): return 0", row) == 0.0


@needs_sandbox
def test_values_that_stay_with_the_solution():
    setup = "root = Node(1)\nroot.left = Node(2)\nroot.left.left = Node(3)\n"
    row = {"test_list": ["assert depth(root) == 3", "assert root.left.value == 2"], "test_setup_code": setup}
    solution = (
        "class Node:\n    def __init__(self, value): self.value, self.left = value, None\n"
        "def depth(node): return 1 + depth(node.left) if node else 0"
    )
    assert mbpp(solution, row) == 1.0
    assert mbpp(solution.replace("1 +", "2 +"), row) == 0.0
    raises = {"test_list": ["try:\n    f(0)\n    assert False, 'no error'\nexcept ZeroDivisionError: pass"]}
    assert mbpp("def f(x): return 1 / x", raises) == 1.0
    assert mbpp("def f(x): return x", raises) == 0.0


@needs_sandbox
def test_programs_judged_by_their_output():
    cases = [{"input": "1 2\n", "output": "3\n", "type": "stdin_stdout"}, {"input": "5\n6\n", "output": "11"}]
    row = {"verification_info": json.dumps({"language": "python", "test_cases": cases})}
    right = "```python\nimport sys\nprint(sum(map(int, sys.stdin.read().split())), ' ')\nprint()\n```"
    assert stdin_stdout(right, row) == 1.0
    assert stdin_stdout(right, {"verification_info": {"inputs": ["1 2", ["3", "4"]], "outputs": ["3", ["7"]]}}) == 1.0
    assert stdin_stdout("print(3)", row) == 0.0
    assert stdin_stdout(right.replace("print()", "1 / 0"), row) == 0.0
    assert stdin_stdout(right + "\ud800", row) == 1.0
    assert stdin_stdout("print('\ud800')\0", row) == 0.0
    assert (
        stdin_stdout(right, {"verification_info": {"test_cases": [{"fn_name": "f", "input": [], "output": 1}]}}) is None
    )
    assert stdin_stdout(right, {"verification_info": None}) is None


def test_without_a_sandbox_the_row_must_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    jail = tmp_path / "jail.py"
    line = "    spaces = NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET\n"
    jail.write_text(sandbox.JAIL.read_text().replace(line, line + '    raise OSError(1, "unshare")\n'))
    monkeypatch.setattr(sandbox, "JAIL", jail)
    right = "def square(x): return x * x"
    for grader, row in ((mbpp, SQUARE), (humaneval, SQUARE_ROW)):
        with pytest.raises(ValueError, match=r"code\.unsafe"):
            grader(right, row)
        assert grader(right, row | {"_code_unsafe": True}) == 1.0
        assert grader("import os; os._exit(0)", row | {"_code_unsafe": True}) == 0.0


def check_mbpp(samples: list[dict[str, Any]], every: bool) -> None:
    """every: alter all of them, not only some."""
    right = grade_all(mbpp, [(row["code"], row) for row in samples])
    assert [row["task_id"] for row, score in zip(samples, right, strict=True) if score != 1.0] == []
    changed = [row | {"test_list": altered(row["test_list"])} for row in samples[:: 1 if every else 3]]
    wrong = grade_all(mbpp, [(row["code"], row) for row in changed])
    assert [row["task_id"] for row, score in zip(changed, wrong, strict=True) if score != 0.0] == []


def check_humaneval(samples: list[dict[str, Any]]) -> None:
    right = grade_all(humaneval, [(row["canonical_solution"], row) for row in samples])
    assert [row["task_id"] for row, score in zip(samples, right, strict=True) if score != 1.0] == []
    wrong = grade_all(humaneval, [("    return 'altered'\n", row) for row in samples])
    assert [row["task_id"] for row, score in zip(samples, wrong, strict=True) if score != 0.0] == []


@needs_data
@needs_sandbox
def test_references_score_one_and_altered_ones_nothing():
    odd = {126, 367, 533, 596, 601, 927}  # a builtin's name, nodes, a type as argument, sys, a class of the solution's
    all_rows = rows("mbpp")
    check_mbpp([row for row in all_rows if row["task_id"] in odd or row["task_id"] % 97 == 0], every=False)
    check_humaneval([row for i, row in enumerate(rows("humaneval")) if i in (32, 33, 38, 50, 53) or i % 41 == 0])


@needs_data
@needs_sandbox
@pytest.mark.slow
def test_all_references_score_one_and_altered_ones_nothing():
    check_mbpp(rows("mbpp"), every=True)
    check_humaneval(rows("humaneval"))


def test_the_graders_are_importable_by_their_paths():
    from qerl.tasks.worker import find

    assert [find(g.path) for g in (shipped.MBPP, shipped.HUMANEVAL, shipped.PROGRAMS)] == [
        mbpp,
        humaneval,
        stdin_stdout,
    ]
