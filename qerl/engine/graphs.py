"""Decode steps as captured CUDA graphs, one for each bucket of rows and each way to draw; contexts may have any length.

A graph holds addresses. Everything it reads is written in place for life (weights, adapter, noise, cache); that this
still holds is checked before graphs are used again, and what has moved is named.
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import torch

from qerl.engine.decode import DecodeBatch
from qerl.engine.drawing import Drawing
from qerl.model.decoder import Decoder

WAYS_TO_DRAW = 4  # whose graphs are kept: training, evaluation and a little more


class Graphs:
    """Replays `DecodeBatch.step`; captures what it has not captured yet. `captured` counts."""

    def __init__(self, batch: DecodeBatch) -> None:
        self.batch = batch
        self.captured = 0
        # By the way to draw, the least recently used first; then by what a step is captured for.
        self._graphs: OrderedDict[Hashable, dict[Hashable, tuple[torch.cuda.CUDAGraph, Drawing]]] = OrderedDict()
        self._pool: Any = None  # memory that all graphs share: they run one after another
        self._addresses: dict[str, int] = {}

    def check(self) -> None:
        """Raises if something that graphs read does not lie where it lay. Called as a stream starts."""
        now = addresses(self.batch.model)
        if not self._graphs:
            self._addresses = now
        elif now != self._addresses:
            moved = [name for name in {**self._addresses, **now} if now.get(name) != self._addresses.get(name)]
            raise ValueError(
                f"{len(moved)} tensors of the model moved, came or went since graphs were captured (the first is "
                f"{moved[0]}): captured steps would read old memory. Change weights, adapter and noise in place, or "
                "make a new Engine."
            )

    def run(self, steps: int, rows: int, noise: bool, drawing: Drawing) -> None:
        """So many decode steps in a row, without a look at the host."""
        graphs = self._graphs.setdefault(drawing.key, {})
        self._graphs.move_to_end(drawing.key)
        if len(self._graphs) > WAYS_TO_DRAW:
            self._graphs.popitem(last=False)
        key, blocks = (rows, noise, self.batch.model.adapter_enabled), self.batch.most_blocks
        if key not in graphs:
            self.batch.step(rows, blocks, noise, drawing)  # real work, and it warms up what capture must not meet first
            steps -= 1
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                self.batch.step(rows, blocks, noise, drawing)
            self._pool = self._pool or graph.pool()
            graphs[key] = graph, drawing  # the drawing's tensors must live as long
            self.captured += 1
        for _ in range(steps):
            graphs[key][0].replay()


def bucket(count: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, ...: powers of two and halfway between."""
    power = 1
    while power < count:
        power *= 2
    return power // 4 * 3 if power >= 4 and count <= power // 4 * 3 else power


def addresses(model: Decoder) -> dict[str, int]:
    """Where every tensor lies that a forward reads, by name."""
    return {name: tensor.data_ptr() for name, tensor in model.tensors()}
