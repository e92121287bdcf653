"""The processes of a run under torchrun: who they are, and all that travels between them.

Every rank holds the whole model and the same state. Of each wave of prompts it samples and scores its share; what came
of it goes to all (`together`), so that everything decided from it (what is refilled, advantages, normalisers, when to
stop) is the same everywhere without further talk. Of each update it computes the gradient of its share, and the sum
over ranks is what every rank steps by. Rank 0 alone writes.

Without torchrun there is one rank, no process group, and every call here is a plain one.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from qerl.config import Config
from qerl.device import resolve_device
from qerl.errors import Interrupted

T = TypeVar("T")
TIMEOUT = timedelta(hours=1)  # that a rank waits for the others: one may draw or grade much longer than another
STOPPED = ""  # in place of an error's text


@dataclass(frozen=True)
class Ranks:
    """One of the processes of a run, as it sees them all. own_work: entered for what a rank does by itself between two
    meetings; only there may it be interrupted."""

    rank: int = 0
    world: int = 1
    local: int = 0  # among those of this machine, and the number of its GPU
    here: int = 1  # on this machine
    own_work: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def first(self) -> bool:
        """Whether it is this one that writes and speaks."""
        return self.rank == 0

    @property
    def command(self) -> str:
        """What people call qerl by."""
        return "qerl" if self.world == 1 else f"torchrun --nproc-per-node {self.here} -m qerl"

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's part: a run of neighbours, so that the parts one after another are the whole."""
        return items[len(items) * self.rank // self.world : len(items) * (self.rank + 1) // self.world]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(found, value)
        except RuntimeError as error:
            raise _left_alone() from error
        return found

    def together(self, work: Callable[[], T]) -> list[T]:
        """Every rank does its work; what came of it, by rank. An interruption or a failure of one ends it for all."""
        if self.world == 1:
            return [work()]
        mine: T | None = None
        failure: Exception | None = None
        ending: str | None = None
        try:
            with self.own_work():
                mine = work()
        except KeyboardInterrupt:
            ending = STOPPED
        except Exception as error:  # noqa: BLE001 - raised below, once the others know
            failure, ending = error, str(error) or type(error).__name__
        told = self.gather((mine, ending))
        if failure is not None:
            raise failure
        for rank, (_, ended) in enumerate(told):
            if ended:
                raise Interrupted(f"Rank {rank} failed, and the run with it: {ended}")
        if any(ended == STOPPED for _, ended in told):
            raise KeyboardInterrupt
        return [value for value, _ in told]  # type: ignore[misc]

    def add_up(self, values: Tensor) -> None:
        """In place: the sum over ranks, the same bits on each."""
        try:
            dist.all_reduce(values)
        except RuntimeError as error:
            raise _left_alone() from error

    def require_same(self, value: object, what: str) -> None:
        """Refuse to go on where ranks have other values. what: the end of the message, and what to do."""
        for rank, other in enumerate(self.gather(value)):
            if other != value:
                raise ValueError(f"Ranks {self.rank} and {rank} differ in {what}")

    def leave(self) -> None:
        """At the end of a run that went well; a process that fails just ends."""
        if self.world > 1:
            dist.destroy_process_group()


ALONE = Ranks()


def launched() -> Ranks:
    """Which process torchrun started this one as; without torchrun, the only one."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ALONE
    rank, world, local, here = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    return Ranks(rank, world, local, here)


def join(config: Config) -> Ranks:
    """Meet the other ranks, on this rank's device. What can't be done with so many is refused first."""
    ranks = launched()
    if ranks.world == 1:
        return ranks
    prompts, device = config.prompts_per_step, resolve_device(config.device)
    if prompts % ranks.world:
        near = max(1, round(prompts / ranks.world)) * ranks.world
        raise ValueError(
            f"prompts_per_step={prompts} can't be shared equally by {ranks.world} ranks. Write for example "
            f"prompts_per_step={near}, or start another number of ranks."
        )
    if device.type == "cuda":
        if device.index is not None:
            raise ValueError(
                f"device={config.device} would put every rank on one GPU. Write device=cuda: each its own."
            )
        if ranks.local >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            raise ValueError(f"This machine has {count} GPUs: no more ranks than that, --nproc-per-node {count}.")
        torch.cuda.set_device(ranks.local)
    store, _, _ = next(rendezvous("env://"))
    meeting = store.add(f"qerl/meetings of rank {ranks.rank}", 1)  # a second run of the process meets anew
    # Gradients travel between GPUs; records, which are Python's, by the CPU.
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(f"qerl/{meeting}", store),  # type: ignore[attr-defined]
        rank=ranks.rank,
        world_size=ranks.world,
        timeout=TIMEOUT,
    )
    return ranks


def flat_gradients(parameters: Sequence[nn.Parameter], more: int = 0) -> Tensor:
    """One buffer of zeros whose pieces are the parameters' gradients: backward adds to them in place, and one sum over
    ranks takes all. more: elements at its end for what else is to be summed."""
    flat = torch.zeros(sum(p.numel() for p in parameters) + more, dtype=torch.float32, device=parameters[0].device)
    start = 0
    for parameter in parameters:
        parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    return flat


def balanced(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Which of the items go to each part, so that the parts are about as large: the largest first, to the emptiest."""
    chosen: list[list[int]] = [[] for _ in range(parts)]
    filled = [0] * parts
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        part = filled.index(min(filled))
        chosen[part].append(i)
        filled[part] += sizes[i]
    return [sorted(part) for part in chosen]


def _left_alone() -> Interrupted:
    return Interrupted("Another rank has ended, and the run with it; what that rank says is the reason.")
