"""Worker processes for graders: a sample that hangs, crashes or eats memory scores 0, and nothing else is hurt.

    with Workers(2) as workers:
        pending = [workers.submit(grader, text, row) for text, row in samples]
        graded = [each.result() for each in pending]

Each worker is a fresh Python process (never a fork of this one, which may hold a GPU) that imports graders and calls
them one sample at a time; a thread here waits on each. When a sample's time is up its worker is killed with SIGKILL,
which no loop in C can hold off, and another takes its place. Samples share nothing, so that scores depend neither on
their order nor on the number of workers. Workers die with this process, however it ends.

Rows travel as JSON: tuples become lists, keys of dictionaries strings, arrays lists, and what JSON does not know text.
"""

import contextlib
import json
import os
import queue
import select
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from qerl.tasks.grader import Grader

Reason = Literal["timeout", "crash", "memory", "error"]

WORKER = Path(__file__).with_name("worker.py")
IMPORT_SECONDS = 120.0  # for a worker to start and import a grader; sympy on a busy machine takes a while
LONGEST_REPLY = 1 << 20
REASONS = ("timeout", "crash", "memory", "error")


@dataclass(frozen=True)
class Graded:
    score: float | None  # None: the grader does not apply; 0.0 where there is a reason
    reason: Reason | None = None  # why there is no real score
    detail: str = ""  # for people


class NotStartedError(Exception):
    """A worker has ended before it came to its sample."""


@dataclass(frozen=True)
class Job:
    grader: Grader
    request: bytes
    future: "Future[Graded]"


class Workers:
    """A pool of worker processes. Start it before CUDA; submit from any thread."""

    def __init__(self, count: int = 2, memory_mb: int = 4096, graders: Sequence[Grader] = ()) -> None:
        """graders: these are made ready at once; others when they are first asked for."""
        if count < 1 or memory_mb < 256:
            raise ValueError(f"{count} workers with {memory_mb} MB: there must be at least one, with at least 256 MB.")
        self.memory_mb, self.graders = memory_mb, tuple(graders)
        self.failures: Counter[str] = Counter()  # samples by reason, since the start
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._closed = False
        self._processes: list[_Process | None] = [None] * count
        self._threads = [
            threading.Thread(target=self._work, args=(slot,), name=f"grader-{slot}", daemon=True)
            for slot in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, grader: Grader, text: str, row: dict[str, Any]) -> "Future[Graded]":
        """Queue a sample. The result never raises for what a grader did; it does if the grader can't be imported."""
        request = {"grader": grader.path, "prepare": grader.prepare, "text": text, "row": row}
        job = Job(grader, json.dumps(request, default=_plain).encode(), Future())
        with self._lock:
            if self._closed:
                raise ValueError("The workers are closed: submit inside the with block.")
            self._jobs.put(job)
        return job.future

    def grade(self, grader: Grader, samples: Iterable[tuple[str, dict[str, Any]]]) -> list[Graded]:
        """All samples, in their order."""
        pending = [self.submit(grader, text, row) for text, row in samples]
        return [each.result() for each in pending]

    def close(self) -> None:
        """End the workers; samples that wait are cancelled. May be called twice."""
        with self._lock:
            self._closed = True
            while not self._jobs.empty():
                with contextlib.suppress(queue.Empty):
                    job = self._jobs.get_nowait()
                    if job is not None:
                        job.future.cancel()
            for _ in self._threads:
                self._jobs.put(None)
            for process in self._processes:
                if process is not None:
                    process.kill()
        for thread in self._threads:
            thread.join()

    def _work(self, slot: int) -> None:
        """The thread of one worker: take a job, see it done or its worker dead, and take the next."""
        if self.graders:
            with contextlib.suppress(OSError):  # no process to be had: said at the first sample, if it is so still
                self._start(slot)
        while (job := self._jobs.get()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                graded = self._graded(slot, job)
            except Exception as error:  # noqa: BLE001 - a thread that ended here would leave its callers waiting
                self._end(slot)
                job.future.set_exception(error)
                continue
            if graded.reason is not None:
                with self._lock:
                    self.failures[graded.reason] += 1
            job.future.set_result(graded)
        self._end(slot)

    def _graded(self, slot: int, job: Job) -> Graded:
        """A worker that ends before it has started on the sample is not the sample's fault: another one is tried."""
        for _ in range(3):
            process = self._processes[slot] or self._start(slot)
            try:
                graded = process.grade(job)
            except NotStartedError:
                self._end(slot)
                if self._closed:
                    break
                continue
            if graded.reason in ("timeout", "crash", "memory"):
                self._end(slot)
            if self._closed and graded.reason == "crash":
                break
            return graded
        if self._closed:
            raise CancelledError("the workers were closed")
        raise ValueError(
            f"Workers end while they import the grader {job.grader.path!r}: import it in Python to see why, or raise "
            f"their memory limit ({self.memory_mb} MB)."
        )

    def _end(self, slot: int) -> None:
        with self._lock:
            process, self._processes[slot] = self._processes[slot], None
        if process is not None:
            process.end()

    def _start(self, slot: int) -> "_Process":
        process = _Process(self.memory_mb, self.graders)
        with self._lock:
            if self._closed:
                process.kill()
            self._processes[slot] = process
        return process


class _Process:
    """One worker process, seen from its thread."""

    def __init__(self, memory_mb: int, graders: Sequence[Grader]) -> None:
        environment = os.environ | {
            "PYTHONHASHSEED": "0",  # the order of sets is the same in every worker and every run
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches this process only, which then ends its workers
            bufsize=0,
        )
        assert self.process.stdin is not None, "a pipe"
        assert self.process.stdout is not None, "a pipe"
        self.requests, self.replies = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.requests, False)
        os.set_blocking(self.replies, False)
        path = [entry or os.getcwd() for entry in sys.path]
        named = [(grader.path, grader.prepare) for grader in graders]
        setting = {"path": path, "memory_mb": memory_mb, "graders": named}
        with contextlib.suppress(OSError, TimeoutError):  # one that has ended already is noticed at its first sample
            self._write(json.dumps(setting).encode(), time.monotonic() + IMPORT_SECONDS)

    def grade(self, job: Job) -> Graded:
        """NotStartedError: the worker has ended, or hung, before it came to the sample."""
        deadline = time.monotonic() + IMPORT_SECONDS
        try:
            self._write(job.request, deadline)
            reply = self._reply(deadline)
        except (TimeoutError, EOFError, OSError, ValueError, TypeError) as error:
            raise NotStartedError from error
        if "missing" in reply:
            raise ValueError(
                f"The grader {job.grader.path!r} can't be imported by a worker: {reply['missing']}. "
                "Write it as module:function, in a module that Python finds."
            )
        try:
            return self._graded(self._reply(time.monotonic() + job.grader.timeout))
        except TimeoutError:
            return Graded(0.0, "timeout", f"no score within {job.grader.timeout:g} s")
        except (EOFError, OSError):
            return Graded(0.0, "crash", f"the worker ended with {self.process.wait(10)}")
        except (ValueError, TypeError, KeyError, RecursionError):
            return Graded(0.0, "crash", "the worker sent no valid reply")

    def _graded(self, reply: dict[str, Any]) -> Graded:
        if (reason := reply.get("reason")) is not None:
            return Graded(0.0, reason if reason in REASONS else "error", str(reply.get("detail", ""))[:2000])
        score = reply["score"]
        return Graded(None if score is None else float(score))

    def _write(self, data: bytes, deadline: float) -> None:
        rest = memoryview(struct.pack(">I", len(data)) + data)
        while rest:
            _wait(self.requests, select.POLLOUT, deadline)
            with contextlib.suppress(BlockingIOError):
                rest = rest[os.write(self.requests, rest) :]

    def _reply(self, deadline: float) -> dict[str, Any]:
        (length,) = struct.unpack(">I", self._read(4, deadline))
        if length > LONGEST_REPLY:
            raise TypeError("too long for a reply")
        reply = json.loads(self._read(length, deadline))
        if not isinstance(reply, dict):
            raise TypeError("not a reply")
        return reply

    def _read(self, count: int, deadline: float) -> bytes:
        data = b""
        while len(data) < count:
            _wait(self.replies, select.POLLIN, deadline)
            with contextlib.suppress(BlockingIOError):
                more = os.read(self.replies, count - len(data))
                if not more:
                    raise EOFError
                data += more
        return data

    def kill(self) -> None:
        """From any thread: its own thread then finds the pipe closed."""
        self.process.kill()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def _wait(file: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(file, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError


def _plain(value: Any) -> Any:
    """What stands in a JSON message for a value that JSON does not know."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
