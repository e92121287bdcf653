"""Worker processes: hostile samples cost themselves only, the pool changes no result, and nothing is left over."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qerl.tasks import shipped
from qerl.tasks.grader import Grader
from qerl.tasks.sandbox import sandbox_available
from qerl.tasks.workers import Graded, Workers

ROOT = Path(__file__).resolve().parents[2]
ECHO = Grader("echo", "tests.tasks.graders:echo", timeout=2.0)
PATIENT = Grader("echo", "tests.tasks.graders:echo", timeout=60.0)
LENGTH = Grader("length", "tests.tasks.graders:length", timeout=60.0)
PROCESS = Grader("process", "tests.tasks.graders:process", timeout=60.0)

HOSTILE = {
    "loop": "timeout",
    "regex": "timeout",
    "sleep": "timeout",
    "exponent": "timeout",
    "memory": "memory",
    "recursion": "error",
    "exit": "crash",
    "signal": "crash",
    "system exit": "crash",
    "raise": "error",
    "nan": "error",
    "not a number": "error",
}

ADD = {"test_list": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]}
HOSTILE_PROGRAMS = {
    "infinite loop": "while True: pass",
    "fork bomb": "import os\nwhile True: os.fork()",
    "10 GB string": "x = 'x' * 10**10\ndef add(a, b): return a + b",
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef add(a, b): return add(a, b) + 0",
    "signal to itself": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "signal to its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "signal to all": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "writing outside": "open('/usr/qerl-was-here', 'w').write('x')",
    "socket": "import socket\nsocket.create_connection(('127.0.0.1', 9))",
    "os._exit": "import os\nos._exit(0)",
    "much output": "while True: print('x' * 1000)",
}


def gone(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return True


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(sandbox_available() is not None, reason="no sandbox here")
def test_hostile_samples_score_nothing_and_the_others_are_graded_rightly():
    quick = Grader("mbpp", shipped.MBPP.path, timeout=3.0)
    good = "```python\ndef add(a, b):\n    return a + b\n```"
    started = time.monotonic()
    with Workers(3) as workers:
        pending, expected = [], []
        for index, (text, reason) in enumerate(HOSTILE.items()):
            pending.append(workers.submit(ECHO, text, {}))
            expected.append((0.0, reason))
            pending.append(workers.submit(PATIENT, str(index), {}))
            expected.append((float(index), None))
        for name, program in HOSTILE_PROGRAMS.items():
            grader = quick if name in ("infinite loop", "deep recursion") else shipped.MBPP
            pending.append(workers.submit(grader, f"```python\n{program}\n```", ADD))
            expected.append((0.0, "timeout" if grader is quick else None))
            pending.append(workers.submit(shipped.MBPP, good, ADD))
            expected.append((1.0, None))
        graded = [each.result(timeout=300) for each in pending]
        failures = dict(workers.failures)
    names = [name for one in (HOSTILE, HOSTILE_PROGRAMS) for name in one for _ in range(2)]
    wrong = [
        (name, got, want)
        for name, got, want in zip(names, graded, expected, strict=True)
        if (got.score, got.reason) != want and name != "deep recursion"
    ]
    assert not wrong
    assert [g.score for g, name in zip(graded, names, strict=True) if name == "deep recursion"] == [0.0, 1.0]
    assert sum(failures.values()) == sum(g.reason is not None for g in graded)
    assert not os.path.exists("/usr/qerl-was-here")
    assert time.monotonic() - started < 240


def test_results_do_not_depend_on_the_number_of_workers():
    drawn = Grader("drawn", "tests.tasks.graders:drawn", timeout=60.0)
    samples = [(text, {}) for text in ("1", "raise", "2.5", "none", "exit", "-3", "memory", "4", "print", "5")]

    def run(count: int) -> tuple[list[Graded], list[Graded]]:
        with Workers(count) as workers:
            return workers.grade(PATIENT, samples), workers.grade(drawn, samples)

    one, three = run(1), run(3)
    assert [(g.score, g.reason) for g in one[0]] == [(g.score, g.reason) for g in three[0]]
    assert [g.score for g in one[0]] == [1.0, 0.0, 2.5, None, 0.0, -3.0, 0.0, 4.0, 1.0, 5.0]
    assert one[1] == three[1]
    assert len({g.score for g in one[1]}) == 1


def test_an_alarm_left_behind_does_not_hurt_the_next_sample():
    with Workers(1) as workers:
        texts = ["1", "alarm", "2", "3"]
        assert [g.reason for g in workers.grade(PATIENT, [(text, {}) for text in texts])] == [None] * 4


def test_a_worker_that_died_between_samples_is_replaced_unnoticed():
    with Workers(1) as workers:
        (first,) = workers.grade(PROCESS, [("", {})])
        os.kill(int(first.score or 0), signal.SIGKILL)
        (second,) = workers.grade(PROCESS, [("", {})])
        assert second.reason is None
        assert second.score != first.score
        assert not workers.failures


def test_a_long_text_and_odd_rows_arrive():
    text = "x" * 3_000_000 + "\ud800"
    kind = Grader("kind", "tests.tasks.graders:kind", timeout=60.0)
    with Workers(1) as workers:
        assert workers.grade(LENGTH, [(text, {"plus": 1})])[0].score == 3_000_002
        odd = {"list": np.arange(3), "int": np.int64(3), "str": Path("x"), "float": 0.5, "NoneType": None, "dict": {}}
        assert [g.score for g in workers.grade(kind, [(k, {"value": v}) for k, v in odd.items()])] == [1.0] * len(odd)


@pytest.mark.parametrize("path", ["no_such_module:f", "tests.tasks.graders:nothing", "tests.tasks.graders:os"])
def test_a_grader_that_cannot_be_imported_is_an_error(path: str):
    with Workers(1) as workers:
        with pytest.raises(ValueError, match="can't be imported"):
            workers.submit(Grader("x", path), "", {}).result(timeout=60)
        assert workers.grade(LENGTH, [("abc", {})])[0].score == 3


@pytest.mark.parametrize("ahead", [True, False])
def test_a_grader_is_prepared_in_every_worker_before_its_first_sample(ahead: bool):
    grader = Grader("prepared", "tests.tasks.graders:prepared", 60.0, prepare="tests.tasks.graders:prepare")
    with Workers(2, graders=[grader] if ahead else []) as workers:
        samples = [("", {})] * 6
        assert {g.score for g in workers.grade(grader, samples)} == {1.0}
        assert workers.grade(PATIENT, [("exit", {})])[0].reason == "crash"
        assert {g.score for g in workers.grade(grader, samples)} == {1.0}, "also in the one that took its place"


def test_preparing_is_off_the_clock_and_its_failure_is_told():
    late = Grader("late", "tests.tasks.graders:length", 0.5, prepare="tests.tasks.graders:slowly")
    broken = Grader("broken", "tests.tasks.graders:length", prepare="tests.tasks.graders:unprepared")
    with Workers(1, graders=[late, broken]) as workers:
        assert workers.grade(late, [("abc", {})])[0].score == 3
        with pytest.raises(ValueError, match="no licence for sympy"):
            workers.grade(broken, [("", {})])


def test_graders_of_mathematics_answer_in_time_from_their_first_sample():
    """math-verify and sympy are loaded before the clock starts."""
    with Workers(1, graders=[shipped.MATH]) as workers:
        quick = replace(shipped.MATH, timeout=2.0)
        assert workers.grade(quick, [("\\boxed{x + x}", {"answer": "2x"})])[0] == Graded(1.0)


def test_closing_ends_everything_at_once():
    workers = Workers(2)
    pids = [int(g.score or 0) for g in workers.grade(PROCESS, [("", {})] * 8)]
    pending = [workers.submit(PATIENT, "loop", {}) for _ in range(6)]
    assert wait_for(lambda: sum(each.running() for each in pending) == 2)
    workers.close()
    workers.close()
    for each in pending:
        with pytest.raises(CancelledError):
            each.result(timeout=10)
    assert all(not os.path.exists(f"/proc/{pid}") for pid in pids), "neither running nor a zombie"
    with pytest.raises(ValueError, match="closed"):
        workers.submit(LENGTH, "", {})


SCRIPT = """
import signal, time
from qerl.tasks.grader import Grader
from qerl.tasks.workers import Workers
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background starts with Ctrl-C ignored
with Workers(2) as workers:
    process = Grader("process", "tests.tasks.graders:process", 60.0)
    print(*{int(g.score) for g in workers.grade(process, [("", {})] * 20)}, flush=True)
    for text in ("regex", "sleep"):
        workers.submit(Grader("echo", "tests.tasks.graders:echo", 600.0), text, {})
    time.sleep(1)
    print("busy", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_workers_die_with_their_parent(number: signal.Signals):
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert pids
        assert parent.stdout.readline() == "busy\n"
        parent.send_signal(number)
        parent.wait(timeout=60)
    assert wait_for(lambda: all(gone(pid) for pid in pids))


@pytest.mark.skipif(sandbox_available() is not None, reason="no sandbox here")
def test_a_program_dies_with_its_worker():
    """A worker that is killed at its deadline takes its sandbox with it."""
    with Workers(1) as workers:
        grader = Grader("mbpp", shipped.MBPP.path, timeout=2.0)
        before = programs()
        pending = workers.submit(grader, "while True: pass", ADD)
        assert wait_for(lambda: bool(programs() - before) or pending.done())
        assert pending.result(timeout=60).reason == "timeout"
        assert wait_for(lambda: not (programs() - before))


def programs() -> set[int]:
    """Processes that the jail has started."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"program.py" in (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
    return found


def test_a_process_that_cant_be_started_is_an_error_and_no_endless_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with Workers(1, graders=[LENGTH]) as workers, pytest.raises(OSError, match="/nowhere/python"):
        workers.submit(LENGTH, "", {}).result(timeout=60)


def test_bad_pools_are_refused():
    with pytest.raises(ValueError, match="at least one"):
        Workers(0)
    with pytest.raises(ValueError, match="256 MB"):
        Workers(1, memory_mb=10)
