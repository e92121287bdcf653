"""Commands of qerl one after another in ranks of torchrun: -m tests.rl.ranks_job FOLDER 'MISHAP:STEPS WORDS' ...

Once so many steps are done, rank 1 meets the mishap in its reward. Exit statuses go to FOLDER/RANK.json.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from qerl.rl.ranks import launched

coming: list[str] = []


def accuracy(completions: list[str], answer: list[str], trainer_state: Any, **kwargs: Any) -> list[float]:
    """The default job's reward."""
    from qerl.tasks import arithmetic

    if launched().rank == 1 and f"interrupt:{trainer_state.global_step}" in coming:
        os.kill(os.getpid(), signal.SIGINT)
    if launched().rank == 1 and f"raise:{trainer_state.global_step}" in coming:
        raise RuntimeError("the judge is gone")
    if launched().rank == 1 and f"die:{trainer_state.global_step}" in coming:
        os._exit(7)
    return [arithmetic.accuracy(text, right) for text, right in zip(completions, answer, strict=True)]


def status(words: list[str]) -> Any:
    """What the command ends with."""
    from qerl.cli import main

    sys.argv = ["qerl", *words]
    try:
        main()
    except SystemExit as end:
        return end.code
    return None


if __name__ == "__main__":
    from tests.rl import ranks_job  # where the reward is found: not this one, which is __main__

    folder, *commands = sys.argv[1:]
    statuses = []
    for command in commands:
        mishap, *words = command.split()
        ranks_job.coming[:] = [mishap]
        statuses.append(status(words))
        if mishap.startswith("die"):
            sys.exit(statuses[-1])
        Path(folder, f"{launched().rank}.json").write_text(json.dumps(statuses))
        if dist.is_initialized():  # a process that has failed just ends; this one goes on
            dist.destroy_process_group()
