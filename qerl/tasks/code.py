"""Graders for programs: MBPP, HumanEval, and programs judged by what they print.

The code is the last fenced Python block of a completion, or all of it where there is none. It scores 1 if all tests
pass, else 0. Everything runs in the sandbox, where a solution and its tests have a process each (see trial.py); a
program that is judged by its output never holds the right output at all.

Where the sandbox is not available the graders refuse with a ValueError, unless the row has a true `_code_unsafe`, which
stands for the setting `code.unsafe`: rows reach workers as plain data, so it travels with them. Whoever hands over rows
of a data set sets it, so that the data can't.
"""

import json
import re
import secrets
import time
from pathlib import Path
from typing import Any

from qerl.tasks.sandbox import Limits, run_program

Row = dict[str, Any]

TESTS = Limits(seconds=10.0, memory_mb=1024)  # all tests of a function together
CASE = Limits(seconds=10.0, memory_mb=1024, output_bytes=10_000_000)  # one run of a program
ALL_CASES = 30.0  # seconds

FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
UNSAFE = "_code_unsafe"
PYTHON = ("python", "py", "python3")


def extract_code(text: str) -> str:
    """The last fenced block that says it is Python, else the last that says nothing, else the text as it is."""
    blocks = FENCE.findall(text)
    for languages in (PYTHON, ("",)):
        found = [code for language, code in blocks if language.lower() in languages]
        if found:
            return str(found[-1])
    return text


def mbpp(text: str, row: Row) -> float | None:
    """Columns `test_list` (assertions, or a string of them) and perhaps `test_setup_code` and `test_imports`."""
    tests = row.get("test_list")
    if not tests:
        return None
    lines = tests.splitlines() if isinstance(tests, str) else tests
    setup = "\n".join([*(row.get("test_imports") or ()), row.get("test_setup_code") or ""])
    return _passes(extract_code(text), "\n".join(lines), setup.replace("\r\n", "\n"), None, row)


def humaneval(text: str, row: Row) -> float | None:
    """Columns `prompt`, `test` and `entry_point`; the completion goes on with the prompt, or writes the function anew.

    Helpers that the prompt defines are the prompt's own for the tests, whatever the solution makes of them. Where the
    dataset's `prompt` has become a chat, the original is looked for in `code_prompt`.
    """
    prompt, entry_point = row.get("code_prompt", row.get("prompt")), row.get("entry_point")
    if not isinstance(prompt, str) or not entry_point or not row.get("test"):
        return None
    code = extract_code(text)
    again = re.search(rf"^(async +)?def +{re.escape(entry_point)}\b", code, re.MULTILINE)
    solution = prompt + ("\n" if again else "") + code
    tests = f"{row['test']}\ncheck({entry_point})\n"
    return _passes(solution, tests, prompt, [entry_point], row)


def stdin_stdout(text: str, row: Row) -> float | None:
    """What is printed must equal the output but for spaces at the ends of lines and of the whole. Columns: see
    `stdin_stdout_cases`."""
    pairs = stdin_stdout_cases(row)
    if pairs is None:
        return None
    code, unsafe = extract_code(text), bool(row.get(UNSAFE))
    deadline = time.monotonic() + ALL_CASES
    for given, wanted in pairs:
        outcome = run_program(code, _as_text(given), limits=CASE, unsafe=unsafe)
        if outcome.status != "ok" or _lines(outcome.stdout) != _lines(_as_text(wanted)):
            return 0.0
        if time.monotonic() > deadline:
            return 0.0
    return 1.0


def stdin_stdout_cases(row: Row) -> list[tuple[Any, Any]] | None:
    """Inputs and outputs from the column `verification_info`: a dictionary or its JSON, with `test_cases` of `input`
    and `output`, or with lists `inputs` and `outputs`. None: the row has none, or tests of a function."""
    info = row.get("verification_info")
    info = json.loads(info) if isinstance(info, str) else info
    if not info:
        return None
    cases = info.get("test_cases")
    if cases is None:
        pairs = list(zip(info.get("inputs") or (), info.get("outputs") or (), strict=True))
    elif any(case.get("fn_name") or case.get("type", "stdin_stdout") != "stdin_stdout" for case in cases):
        return None  # tests of a function, which is another kind of task
    else:
        pairs = [(case["input"], case["output"]) for case in cases]
    return pairs or None


def _passes(solution: str, tests: str, setup: str, asked: list[str] | None, row: Row) -> float:
    token = secrets.token_hex(16)
    trial = Path(__file__).with_name("trial.py").read_text(encoding="utf-8")
    pipes = 'open(4, encoding="utf-8"), open(5, "w", encoding="utf-8")'
    server = f"{trial}\nserve({solution!r}, {pipes})\n"
    main = (
        f"{trial}\nreplies, requests = {pipes}\njudge({tests!r}, {setup!r}, {asked!r}, {token!r}, requests, replies)\n"
    )
    outcome = run_program(main, limits=TESTS, unsafe=bool(row.get(UNSAFE)), server=server)
    return float(outcome.status == "ok" and outcome.stdout == token)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]
