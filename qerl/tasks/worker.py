"""A worker process: grades one sample at a time and answers on a pipe. Started by workers.py as a file of its own.

Messages are JSON behind four bytes of length. Nothing that a worker sends is ever unpickled. It first learns how to
import (`path`), its memory limit, and which graders to make ready before anybody asks; then for each sample it says
`started` when the grader is ready, so that the clock runs for grading only, and sends the score. Standard library only,
until a grader is imported.
"""

import contextlib
import ctypes
import importlib
import json
import math
import os
import random
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

GraderFunction = Callable[[str, dict[str, Any]], float | None]

PR_SET_PDEATHSIG = 1


def send(stream: BinaryIO, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    stream.write(struct.pack(">I", len(data)) + data)
    stream.flush()


def receive(stream: BinaryIO) -> dict[str, Any] | None:
    """None at the end of the stream."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    (length,) = struct.unpack(">I", head)
    data = stream.read(length)
    return json.loads(data) if len(data) == length else None


def find(path: str) -> GraderFunction:
    module, _, name = path.partition(":")
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    if not callable(function):
        raise TypeError(f"{path} is not a function")
    return function  # type: ignore[no-any-return]


def ready(path: str, prepare: str) -> GraderFunction:
    """A grader, imported, with what it loads lazily loaded."""
    function: Any = find(path)
    if prepare:
        preparation: Any = find(prepare)
        preparation()
    return function  # type: ignore[no-any-return]


def grade(function: GraderFunction, text: str, row: dict[str, Any]) -> dict[str, Any]:
    random.seed(0)  # a grader that draws numbers gives the same score whichever samples came before
    try:
        value = function(text, row)
        if value is None:
            return {"score": None}
        score = float(value)
        if not math.isfinite(score):
            return {"reason": "error", "detail": f"the grader returned {score}"}
    except MemoryError:
        return {"reason": "memory", "detail": "MemoryError"}
    except Exception as error:  # noqa: BLE001 - whatever a grader raises costs its sample, not the run
        return {"reason": "error", "detail": raised(error, __file__)}
    return {"score": score}


def raised(error: BaseException, ours: str) -> str:
    """What a user's code raised and where. ours: the file that called it."""
    trace = traceback.extract_tb(error.__traceback__)
    frames = [f for f in trace if f.filename not in (ours, importlib.__file__) and not f.filename.startswith("<frozen")]
    places = [f"{frame.filename}, line {frame.lineno}, in {frame.name}" for frame in frames[:2] + frames[2:][-1:]]
    return "\n  ".join((f"{type(error).__name__}: {error}"[:500], *places))[:2000]


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        return
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for place in (0, 1):  # a grader that reads or prints does not meet the protocol
        os.dup2(nothing, place)
    setting = receive(requests)
    if setting is None:
        return
    sys.path[:] = setting["path"]
    limit = setting["memory_mb"] << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    found: dict[tuple[str, str], GraderFunction] = {}
    for path, prepare in setting["graders"]:
        with contextlib.suppress(Exception):  # whoever asks for this one hears why
            found[path, prepare] = ready(path, prepare)
    depth = sys.getrecursionlimit()
    while (job := receive(requests)) is not None:
        grader = job["grader"], job["prepare"]
        if grader not in found:
            try:
                found[grader] = ready(*grader)
            except Exception as error:  # noqa: BLE001 - importing runs any code; the reason goes to the caller
                send(replies, {"missing": f"{type(error).__name__}: {error}"[:500]})
                continue
        send(replies, {"started": True})
        reply = grade(found[grader], job["text"], job["row"])
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that a grader has left on would meet the next sample
        sys.setrecursionlimit(depth)
        send(replies, reply)
        if reply.get("reason") == "memory":
            return  # what is left of this process is not to be relied on


if __name__ == "__main__":
    main()
