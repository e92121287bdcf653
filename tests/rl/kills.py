"""A training run that is killed in a chosen phase: python -m tests.rl.kills PHASE SEED LOG train KEY=VALUE ...

PHASE:2 is the beginning of the second time that the phase is met, PHASE alone a random moment of it. A thread looks at
what the main thread is doing and kills the process with SIGKILL when it is inside the phase, so that the package needs
no hooks. The phase goes to LOG just before.
"""

import os
import random
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

PLACES = {  # a function that is on the stack during the phase
    ("rl/checkpoint.py", "save"): "checkpoint",
    ("rl/trainer.py", "update"): "update",
    ("rl/rollout.py", "score"): "reward",
    ("rl/rollout.py", "sample"): "rollout",
    ("rl/evaluate.py", "evaluate"): "evaluation",  # which samples and scores as well: the outermost place counts
}
PHASES = tuple(PLACES.values())
ANYWHERE = "anywhere"  # loading and resuming included
NOT_AT_ALL = "not at all"


def accuracy(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """The default job's reward, slow enough to be met."""
    from qerl.tasks import arithmetic

    time.sleep(0.03)
    return [arithmetic.accuracy(text, right) for text, right in zip(completions, answer, strict=True)]


def phase_of(frame: FrameType | None) -> str | None:
    found = None
    while frame is not None:
        name = frame.f_code.co_filename.replace(os.sep, "/")
        found = PLACES.get(("/".join(name.split("/")[-2:]), frame.f_code.co_name), found)
        frame = frame.f_back
    return found


def kill_in(phase: str, seed: str, log: str) -> None:
    """At a random moment of one of the first times that the phase is met, or at the time that is asked for."""
    draw = random.Random(seed)
    phase, _, asked = phase.partition(":")
    main = threading.main_thread().ident or 0
    if phase == ANYWHERE:
        time.sleep(draw.random() * 8)
        strike(phase, log)
    passed, within, before = draw.randrange(2), draw.random() * 0.3, None
    if asked:
        passed, within = int(asked) - 1, 0.0
    while True:
        now = phase_of(sys._current_frames().get(main))
        if now == phase != before:
            if passed > 0:
                passed -= 1
            else:
                time.sleep(within)
                if phase_of(sys._current_frames().get(main)) == phase:
                    strike(phase, log)
                within /= 2  # it was over by then
        before = now
        time.sleep(0.0005)


def strike(phase: str, log: str) -> None:
    with open(log, "a") as file:
        file.write(f"{phase}\n")
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    phase, seed, log, *words = sys.argv[1:]
    if phase != NOT_AT_ALL:
        threading.Thread(target=kill_in, args=(phase, seed, log), daemon=True).start()
    import torch

    torch.set_num_threads(1)  # bit for bit asks for the same number of threads
    from qerl.cli import main

    sys.argv = ["qerl", *words]
    main()
