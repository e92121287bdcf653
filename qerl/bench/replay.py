"""Time on a GPU: calls captured in a graph, one after another as in a decode step, replayed."""

from collections.abc import Callable, Sequence

import torch

BANDWIDTH = 4.0e12  # bytes a second that an H200 reads at best
COMPUTE = 780e12  # and floating-point operations in bf16


def microseconds(calls: Sequence[Callable[[], object]], repeats: int = 10) -> float:
    """The median time of a call."""
    for call in calls:  # kernels are compiled before the capture
        call()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    graph.replay()
    events = [(_event(), _event()) for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = sorted(float(begin.elapsed_time(end)) for begin, end in events)
    return 1e3 * times[len(times) // 2] / len(calls)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def floor(nbytes: float, operations: float) -> float:
    """Microseconds that the bytes or the arithmetic take at least, on an H200."""
    return 1e6 * max(nbytes / BANDWIDTH, operations / COMPUTE)
