"""A step on its way: what it draws travels to the host while the device goes on with the next one."""

from collections.abc import Sequence as Series

import numpy as np
import torch
from torch import Tensor

from qerl.engine.scheduler import Step
from qerl.engine.sequence import Sequence

Drawn = tuple[list[int], list[float], list[float]]  # tokens, log-probs as drawn, log-probs before filters


class Look:
    """Made as soon as the step's work is enqueued; `drawn` waits for it.

    The copy to the host is enqueued here, behind the step and before all that the stream gets later, so that the next
    step may overwrite the tensors. rows: who has which row of them; tokens_SL int64, logprobs_2SL float32: what each
    row drew in L steps, log-probs as drawn and before filters.
    """

    def __init__(self, step: Step, rows: Series[Sequence | None], tokens_SL: Tensor, logprobs_2SL: Tensor) -> None:
        self.step = step
        self._row_of = {sequence: row for row, sequence in enumerate(rows)}  # now: rows change with the next step
        self._tokens, self._logprobs = _on_host(tokens_SL), _on_host(logprobs_2SL)
        self._arrived: torch.cuda.Event | None = None
        if tokens_SL.is_cuda and rows:
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def wait(self) -> None:
        if self._arrived is not None:
            self._arrived.synchronize()

    def drawn(self) -> dict[Sequence, Drawn]:
        """Of the sequences that sample, in the step's order. Those that a look before this one has ended are left out:
        what they drew here is past their end."""
        self.wait()
        tokens, (logprobs, policy) = self._tokens.numpy().tolist(), self._logprobs.numpy().tolist()
        drawn: dict[Sequence, Drawn] = {}
        for sequence, _, _, samples in self.step.chunks:
            if samples and not sequence.finished:
                row = self._row_of[sequence]
                drawn[sequence] = tokens[row], logprobs[row], policy[row]
        return drawn

    def has_nan(self) -> bool:
        """Whether any row drew from logits that are not numbers, be it past its end."""
        self.wait()
        return bool(np.isnan(self._logprobs[0].numpy()).any())


def _on_host(values: Tensor) -> Tensor:
    """A copy, from a GPU into pinned memory without waiting for it."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    return host.copy_(values, non_blocking=True)
