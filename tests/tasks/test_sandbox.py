"""The sandbox: what a program can't do, how its end is told, and that nothing of it is left."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from qerl.tasks import sandbox
from qerl.tasks.sandbox import Limits, run_program, sandbox_available

ROOT = Path(__file__).resolve().parents[2]
needs_sandbox = pytest.mark.skipif(sandbox_available() is not None, reason="no sandbox here")
both = pytest.mark.parametrize("unsafe", [pytest.param(False, marks=needs_sandbox), True], ids=["safe", "unsafe"])
QUICK = Limits(seconds=1.0, memory_mb=512, output_bytes=100_000, disk_mb=4)
PATIENT = Limits(seconds=60.0, memory_mb=512, output_bytes=100_000, disk_mb=4)


def result(source: str, unsafe: bool = False, stdin: str = "", limits: Limits = PATIENT) -> str:
    outcome = run_program(source, stdin, limits=limits, unsafe=unsafe)
    assert outcome.status == "ok", outcome
    return outcome.stdout.strip()


@both
def test_a_program_reads_and_prints(unsafe: bool):
    text = "äöü 日本\n" * 1000
    assert result("import sys\nfor line in sys.stdin: print(line, end='')", unsafe, text) == text.strip()
    assert result("print(input())\nexit(0)", unsafe, "7\n") == "7"
    assert result("if __name__ == '__main__': print(__name__)", unsafe) == "__main__"


@both
@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("while True: pass", "timeout"),
        ("import time; time.sleep(100)", "timeout"),
        ("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", "timeout"),
        ("x = 'x' * 10**10", "memory"),
        ("while True: print('x' * 1000)", "output"),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "output"),
        ("1 / 0", "error"),
        ("exit(3)", "error"),
        ("import os; os.abort()", "error"),
        ("def f(): f()\nf()", "error"),
        ("not python", "error"),
    ],
)
def test_how_programs_end(source: str, status: str, unsafe: bool):
    started = time.monotonic()
    limits = QUICK if status == "timeout" else PATIENT
    assert run_program(source, limits=limits, unsafe=unsafe).status == status
    assert time.monotonic() - started < 60


@both
def test_what_is_limited_with_and_without_namespaces(unsafe: bool):
    refused = """
import os
def refused(action):
    try: action()
    except (OSError, ValueError): return True
"""
    assert result(refused + "print(refused(os.fork))", unsafe) == "True"
    assert result(refused + "import subprocess; print(refused(lambda: subprocess.run(['true'])))", unsafe) == "True"
    assert result(refused + "print(refused(lambda: os.kill(os.getppid(), 9)))", unsafe) == "True"
    assert result(refused + "print(refused(lambda: os.kill(-1, 9)))", unsafe) == "True"
    assert result(refused + "print(refused(os.setsid))", unsafe) == "True"
    assert result(refused + "import socket; print(refused(socket.socket))", unsafe) == "True"
    assert result(refused + "print(refused(lambda: open('f', 'wb').write(bytes(5 << 20))))", unsafe) == "True"
    raised = "from resource import *; print(refused(lambda: setrlimit(RLIMIT_AS, (-1, -1))))"
    assert result(refused + raised, unsafe) == "True"
    assert result("import resource; print(resource.getrlimit(resource.RLIMIT_CORE))", unsafe) == "(0, 0)"


@both
def test_threads_and_event_loops_are_allowed(unsafe: bool):
    source = """
import asyncio, sys, threading
threading.stack_size(1 << 27)
sys.setrecursionlimit(10**6)
thread = threading.Thread(target=lambda: print("thread"))
thread.start()
thread.join()
async def main(): print("loop")
asyncio.run(main())
"""
    assert result(source, unsafe).split() == ["thread", "loop"]


@needs_sandbox
def test_threads_are_limited():
    """By their number, since many small stacks fit into the memory."""
    source = """
import os, threading
threading.stack_size(32768)
wait, count = threading.Event().wait, 0
try:
    while count < 3000:
        threading.Thread(target=wait, daemon=True).start()
        count += 1
except RuntimeError: print("refused", flush=True)
os._exit(0)
"""
    assert result(source) == "refused"


@both
def test_a_program_cannot_ask_to_outlive_its_parent(unsafe: bool):
    source = """
import ctypes
libc = ctypes.CDLL(None)
print(libc.prctl(1, 0, 0, 0, 0), libc.prctl(15, b"name", 0, 0, 0))
"""
    assert result(source, unsafe) == "-1 0"


@both
def test_environment_folder_and_modules(unsafe: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("QERL_SECRET", "x")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    names = result("import os; print(*os.environ)", unsafe).split()
    assert sorted(names) == ["HOME", "LANG", "PATH", "PYTHONHASHSEED"]
    assert result("import os; print(os.listdir('.')); open('x', 'w').close(); print(os.listdir('.'))", unsafe) == (
        "[]\n['x']"
    )
    assert result("import os; print(os.listdir('.'))", unsafe) == "[]"
    assert result("import sys; print([p for p in sys.path if 'site-packages' in p or p == '/nowhere'])", unsafe) == "[]"
    assert run_program("import numpy", limits=PATIENT, unsafe=unsafe).status == "error"
    still_open = "import os\nfor file in range(3, 100):\n    try: os.fstat(file); print(file)\n    except OSError: pass"
    assert result(still_open, unsafe) == ""
    sets = "print({'a', 'b', 'c', 'd', 'e'})"
    assert result(sets, unsafe) == result(sets, unsafe)


@needs_sandbox
def test_nothing_of_the_host_can_be_seen_or_written(tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("x")
    seen = [str(secret), str(ROOT), "/proc/self", "/sys/class", "/etc/passwd", "/home", "/var"]
    assert result(f"import os; print([p for p in {seen!r} if os.path.exists(p)])") == "[]"
    source = """
import os, sys
for path in ("/x", "/usr/x", "/etc/x", "/dev/x", os.path.join(sys.prefix, "x")):
    try: open(path, "w"); print(path)
    except OSError: pass
"""
    assert result(source) == ""
    assert result("import os; print(os.getuid() > 0, os.getpid() < 10)") == "True True"
    filled = run_program("for i in range(100):\n    open(str(i), 'wb').write(bytes(1 << 20))", limits=PATIENT)
    assert "No space left" in filled.stderr_tail


@needs_sandbox
def test_privileges_cannot_be_had_back():
    source = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.unshare(0x10000000), libc.mount(b"none", b"/tmp", b"tmpfs", 0, None), libc.ptrace(0, 0, 0, 0))
print(libc.syscall(57), libc.syscall(435, 0, 0) if os.uname().machine == "x86_64" else -1)
try: os.setuid(0); print("root")
except OSError: print("no")
"""
    assert result(source).split() == ["-1", "-1", "-1", "-1", "-1", "no"]


@both
def test_two_programs_talk(unsafe: bool):
    main = """
ask, hear = open(5, "w"), open(4)
print(7, file=ask, flush=True)
print("answer", hear.readline().strip())
"""
    server = """
import os
print("not in the result", flush=True)
os.write(5, b"%d\\n" % (int(open(4).readline()) ** 2))
while True: pass
"""
    outcome = run_program(main, limits=PATIENT, unsafe=unsafe, server=server)
    assert (outcome.status, outcome.stdout) == ("ok", "answer 49\n")
    assert "not in the result" in outcome.stderr_tail


@both
def test_many_threads_may_run_programs(unsafe: bool):
    results: list[str] = []
    threads = [
        threading.Thread(target=lambda i=i: results.append(result(f"print({i})", unsafe)), daemon=True)
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [str(i) for i in range(8)]


def test_it_works_whatever_files_are_open():
    """The jail moves its own out of the way of a program's, wherever they are."""
    with contextlib.ExitStack() as stack:
        while (file := os.open(os.devnull, os.O_RDONLY)) < 45:
            stack.callback(os.close, file)
        stack.callback(os.close, file)
        for _ in range(18):
            assert result("print(1)", unsafe=True) == "1"
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))


def test_nothing_is_left_open_or_lying_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = sorted(os.listdir("/proc/self/fd"))
    for source in ("open('x', 'w')", "while True: pass", "1 / 0"):
        run_program(source, limits=Limits(seconds=1.0), unsafe=True)
    assert not list(tmp_path.iterdir())
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_without_isolation_programs_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    jail = tmp_path / "jail.py"
    text = sandbox.JAIL.read_text()
    line = "    spaces = NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET\n"
    assert line in text
    jail.write_text(text.replace(line, line + '    raise PermissionError(1, "unshare: not permitted")\n'))
    monkeypatch.setattr(sandbox, "JAIL", jail)
    with pytest.raises(ValueError, match=r"unshare: not permitted.*code\.unsafe: true"):
        run_program("print(1)")
    assert "unshare: not permitted" in (sandbox_available.__wrapped__() or "")
    assert run_program("print(1)", unsafe=True, limits=PATIENT).status == "ok"


@needs_sandbox
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become someone else")
@pytest.mark.parametrize("who", ["user", "root without CAP_SYS_ADMIN", "root of a container"])
def test_it_works_for_others_than_root(who: str):
    """By a user namespace, with the system's Python, which others may run; or it says why not."""
    python, drop_cap_sys_admin = "/usr/bin/python3", "import ctypes; ctypes.CDLL(None).prctl(24, 21, 0, 0, 0)"
    script = "from qerl.tasks.sandbox import sandbox_available; print(sandbox_available())"
    new_enough = "import sys; sys.exit(sys.version_info < (3, 11))"
    if (
        not shutil.which("unshare")
        or not os.path.exists(python)
        or subprocess.run([python, "-c", new_enough], check=False).returncode
    ):
        pytest.skip("the system's Python is too old")
    if who == "user":
        command, identity = [python, "-c", script], {"user": 4321, "group": 4321, "extra_groups": []}
    elif who == "root of a container":
        command, identity = ["unshare", "-Ur", python, "-c", script], {}
    else:
        again = f"import os; os.execv({python!r}, [{python!r}, '-c', {script!r}])"
        command, identity = [python, "-c", f"{drop_cap_sys_admin}; {again}"], {}
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        copy = Path(folder, "qerl", "tasks")
        copy.mkdir(parents=True)
        for name in ("sandbox.py", "jail.py"):
            shutil.copy(sandbox.JAIL.with_name(name), copy)
        done = subprocess.run(
            command, cwd=folder, env={"PATH": os.defpath}, capture_output=True, text=True, check=False, **identity
        )
    assert done.stdout.strip() == "None" or "unshare" in done.stdout, done.stdout + done.stderr


def test_the_interpreter_is_the_one_that_runs():
    version = result("import sys; print(sys.version_info[:2])", unsafe=True)
    assert version == str(sys.version_info[:2])
