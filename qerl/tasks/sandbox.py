"""Run a Python program that nobody has read, apart from everything else.

`run_program` starts `jail.py` in a process of its own, which shuts the program in by namespaces (no network, its own
process numbers, a file system with Python and an empty /tmp and nothing else), a system call filter (one process, no
sockets) and limits on time, memory, output and files. This module watches from outside: it reads what the program
prints, and at the deadline or the output limit kills everything in there. docs/sandbox.md says what this protects from.

Python runs with `-s -P -S -B` and an environment of four variables: no site-packages (so no .pth file runs and nothing
but the standard library can be imported), nothing from the user's folders or settings, and a fixed hash seed, so that
sets have the same order in every run. `-I` would do that too, but would ignore the hash seed.
"""

import contextlib
import functools
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

JAIL = Path(__file__).with_name("jail.py")
SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/ld.so.cache")
TAIL = 2000  # characters of stderr that are kept
REMEDY = "Set code.unsafe: true to run programs with limits only, if you trust the model not to harm this machine."

Status = Literal["ok", "timeout", "memory", "output", "error"]


@dataclass(frozen=True)
class Limits:
    seconds: float = 10.0  # by the clock; processor time has the same limit, rounded up
    memory_mb: int = 1024  # address space
    output_bytes: int = 1_000_000  # stdout, and as much again for stderr
    disk_mb: int = 16  # of the working folder, and of any one file


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Outcome:
    status: Status  # ok: the program ended by itself with exit status 0
    stdout: str
    stderr_tail: str
    seconds: float


def run_program(
    source: str,
    stdin: str = "",
    *,
    limits: Limits = DEFAULT_LIMITS,
    unsafe: bool = False,
    server: str | None = None,
) -> Outcome:
    """Run a program; `server` is the source of a second one that it talks to.

    The main program reads what the server writes, and the other way round: both read file descriptor 4 and write 5.
    The server has no stdin, and what it prints goes to stderr; it ends when the main program does.
    """
    with contextlib.ExitStack() as stack:
        folder = "/"
        if unsafe:
            folder = tempfile.mkdtemp(prefix="qerl-")
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        orders = json.dumps(
            {
                "sources": [source] if server is None else [source, server],
                "limits": {
                    "memory": limits.memory_mb << 20,
                    "cpu": int(limits.seconds) + 1,
                    "disk": limits.disk_mb << 20,
                },
                "unsafe": unsafe,
                "visible": _visible(),
                "python": os.path.realpath(sys.executable),
                "environment": {
                    "PATH": "/usr/bin:/bin",
                    "HOME": folder if unsafe else "/tmp",
                    "LANG": "C.UTF-8",
                    "PYTHONHASHSEED": "0",
                },
                "parent": os.getpid(),
            }
        )
        return _watch(orders, stdin, folder, limits)


def _watch(orders: str, stdin: str, folder: str, limits: Limits) -> Outcome:
    with contextlib.ExitStack() as stack:
        orders_file, stdin_file = (stack.enter_context(_memory_file(text)) for text in (orders, stdin))
        report, report_end = os.pipe()
        stack.callback(os.close, report)
        started = time.monotonic()
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(JAIL), str(orders_file), str(report_end)],
                stdin=stdin_file,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
                env={},
                pass_fds=(orders_file, report_end),
                start_new_session=True,
            )
        finally:
            os.close(report_end)
        assert process.stdout is not None, "a pipe"
        assert process.stderr is not None, "a pipe"
        with process, contextlib.ExitStack() as running:
            running.callback(_end, process)
            out, err, report_text = bytearray(), bytearray(), bytearray()
            pipes = {process.stdout.fileno(): out, process.stderr.fileno(): err, report: report_text}
            stopped = _read(process.pid, pipes, started + limits.seconds, limits.output_bytes)
        seconds = time.monotonic() - started
    if report_text:
        raise ValueError(f"The sandbox is not available here ({report_text.decode(errors='replace')}). {REMEDY}")
    tail = err[-4 * TAIL :].decode(errors="replace")[-TAIL:]
    status = stopped or _status(process.returncode, tail, seconds, limits)
    return Outcome(status, out[: limits.output_bytes].decode(errors="replace"), tail, seconds)


def _read(pid: int, pipes: dict[int, bytearray], deadline: float, most: int) -> Status | None:
    """Reads until the process ends (None), the deadline passes or one of the pipes has given too much."""
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        ended = os.pidfd_open(pid)
        stack.callback(os.close, ended)
        selector.register(ended, selectors.EVENT_READ)
        for pipe in pipes:
            os.set_blocking(pipe, False)
            selector.register(pipe, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select(max(0.0, deadline - time.monotonic()))}
            for pipe in pipes:
                # what lies in a pipe when the process has ended is still to be read
                while pipe in ready or ended in ready:
                    try:
                        data = os.read(pipe, 1 << 16)
                    except BlockingIOError:
                        break
                    pipes[pipe] += data
                    if len(pipes[pipe]) > most:
                        return "output"
                    if not data:
                        with contextlib.suppress(KeyError):
                            selector.unregister(pipe)
                        break
            if ended in ready:
                return None
            if time.monotonic() >= deadline:
                return "timeout"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill the jail's process group: its process 1 dies, and with it all that is in there. Not reaped before: the
    number can't have gone to another process."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _status(code: int, tail: str, seconds: float, limits: Limits) -> Status:
    if code == 0:
        return "ok"
    if code == 128 + signal.SIGXCPU or (code == 128 + signal.SIGKILL and seconds >= int(limits.seconds)):
        return "timeout"
    last = tail.rstrip().rpartition("\n")[2]
    return "memory" if last.startswith("MemoryError") else "error"


@contextlib.contextmanager
def _memory_file(text: str) -> Iterator[int]:
    file = os.memfd_create("qerl")
    try:
        with open(file, "w", encoding="utf-8", errors="replace", closefd=False) as stream:
            stream.write(text)
        os.lseek(file, 0, os.SEEK_SET)
        yield file
    finally:
        os.close(file)


@functools.cache
def _visible() -> list[str]:
    """What a program may see of the file system: the system's libraries and this Python's own folders."""
    python = {sys.base_prefix, sys.base_exec_prefix, sysconfig.get_config_var("LIBDIR") or sys.base_prefix}
    folders = {os.path.realpath(path) for path in python}
    return sorted({*SYSTEM, *folders, os.path.realpath(sys.executable)} - {"/"})


PROBE = """
import os, socket
open("here", "w").close()
def refused(action):
    try: action()
    except OSError: return True
    return False
checks = {
    "processes are not limited": refused(os.fork),
    "files outside the working folder can be written": refused(lambda: open("/outside", "w")),
    "folders of the host can be seen": refused(lambda: os.listdir("/home")) and refused(lambda: os.listdir("/proc")),
    "the network can be reached": refused(lambda: socket.create_connection(("127.0.0.1", 9), 1)),
}
print(*(reason for reason, fine in checks.items() if not fine), sep=", ")
"""


@functools.cache
def sandbox_available() -> str | None:
    """None if programs can be shut in on this system, else the reason why not. Found out by trying, once."""
    if sys.platform != "linux":
        return "it needs Linux"
    try:
        outcome = run_program(PROBE, limits=Limits(seconds=60))
    except ValueError as error:
        return str(error).partition("(")[2].rpartition(")")[0]
    if outcome.status != "ok":
        return f"a trial program ended in {outcome.status}: {outcome.stderr_tail.strip()[-200:]}"
    return outcome.stdout.strip() or None
