"""Seconds by part, with the device's work done before each look at the time; and what lies in its memory."""

import gc
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from qerl.engine.virtual_memory import VirtualMemory


class Clock:
    """Adds up the seconds of parts; a part within another counts to itself alone."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]  # of the parts within the one that runs

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._inner.append(0.0)
        started = self._now()
        try:
            yield
        finally:
            took = self._now() - started
            self.seconds[name] += took - self._inner.pop()
            self._inner[-1] += took

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gb(device: torch.device) -> float | None:
    """What torch had allocated at most; None on a CPU."""
    return round(torch.cuda.max_memory_allocated(device) / 1e9, 3) if device.type == "cuda" else None


def allocated_gb(device: torch.device) -> float | None:
    return round(torch.cuda.memory_allocated(device) / 1e9, 4) if device.type == "cuda" else None


def occupied(gigabytes: float | None, device: torch.device) -> VirtualMemory | None:
    """Takes so much of a GPU that only these gigabytes are left for everything, CUDA's context and the cache included;
    hold on to it. torch does not count it."""
    if gigabytes is None:
        return None
    if device.type != "cuda":
        raise ValueError("--limit-gb is for a GPU's memory: leave it out on a CPU.")
    total = torch.cuda.mem_get_info(device)[1]
    rest = int(total - gigabytes * 1e9)
    if rest <= 0:
        raise ValueError(f"--limit-gb {gigabytes:g}: the GPU has {total / 1e9:.1f} GB.")
    return VirtualMemory(rest, device)
