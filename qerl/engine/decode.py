"""One decode step over device buffers: reads the last tokens, draws the next ones, and is ready to be run again.

Nothing in a step looks at the host, so it can be captured in a graph and replayed; several steps go by between looks.
"""

from collections.abc import Sequence as Series

import torch
from torch import Tensor

from qerl.engine.cache import Cache
from qerl.engine.drawing import Drawing
from qerl.engine.rows import Rows
from qerl.engine.sequence import Sequence
from qerl.kernels.decode_state import DRAWN, KEY, POSITION, TOKEN, advance, places
from qerl.kernels.heads import Heads, turned_into_cache
from qerl.kernels.paged_attention import paged_attention
from qerl.model.decoder import Decoder


class DecodeBatch:
    """A row a sequence. numbers int64 [4, rows]: last token, its position, tokens drawn, random numbers' key; table
    int64 [rows, most_blocks]: its blocks in order, the trash block where it has none."""

    def __init__(self, model: Decoder, cache: Cache, rows: int, most_blocks: int, lookahead: int) -> None:
        self.model, self.cache, self.most_blocks = model, cache, most_blocks
        device = model.device
        self.numbers = torch.zeros(4, rows, dtype=torch.int64, device=device)
        self.table = torch.full((rows, most_blocks), cache.trash, dtype=torch.int64, device=device)
        self.rows = Rows(rows, most_blocks, cache.trash)
        self.used = 0  # rows of the last fill
        self.at = torch.zeros(1, dtype=torch.int64, device=device)  # which step since the last look
        self.tokens = torch.zeros(lookahead, rows, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(2, lookahead, rows, dtype=torch.float32, device=device)
        self.counters = torch.zeros(rows * model.arch.kv_heads, dtype=torch.int32, device=device)
        self.seen_SV: Tensor | None = None

    def fill(self, sequences: Series[Sequence], rows: int, drawing: Drawing) -> None:
        """Bring the sequences' state to the first `rows` rows of the device. Rows beyond them write to the trash block.

        All that they have drawn must be known: no look may be on its way.
        """
        seated = self.rows.seat(sequences)
        self.used = rows
        at, blocks = self.rows.changes(rows)
        empty = [0] * (rows - len(seated))
        host = [q.last for q in seated] + empty
        host += [len(q) - 1 for q in seated] + empty
        host += [len(q.output) for q in seated] + empty
        host += [q.key for q in seated] + empty
        sent, sizes = self._sent(host + at + blocks), [4 * rows, len(at), len(at)]
        numbers, index, held = sent.split_with_sizes(sizes)
        self.numbers[:, :rows].copy_(numbers.view(4, rows))
        if at:
            self.table.view(-1).index_copy_(0, index, held)
        self.at.zero_()
        if drawing.penalizes:
            if self.seen_SV is None:
                self.seen_SV = torch.zeros(
                    len(self.table), self.model.arch.vocab, dtype=torch.bool, device=self.model.device
                )
            mark_seen(self.seen_SV[:rows], seated)

    def go_on(self, sequences: Series[Sequence]) -> None:
        """Be ready for more steps of these sequences, which have rows already, whatever the steps under way draw.

        Last tokens, positions, counts and tokens seen are the device's own; it lacks only new blocks. Rows of others
        become empty: they write to the trash block, and their positions do not grow out of the table.
        """
        empty = self.rows.keep(sequences)
        at, blocks = self.rows.changes(self.used)
        if at or empty:
            sent, sizes = self._sent(at + blocks + empty), [len(at), len(at), len(empty)]
            index, held, rows = sent.split_with_sizes(sizes)
            self.table.view(-1).index_copy_(0, index, held)
            self.numbers.index_fill_(1, rows, 0)
        self.at.zero_()

    def clear(self) -> None:
        """Forget everyone: after a call that was broken off the host's picture of the table may be wrong."""
        self.rows = Rows(len(self.table), self.most_blocks, self.cache.trash)
        self.table.fill_(self.cache.trash)

    @torch.no_grad()
    def step(self, rows: int, blocks: int, noise: bool, drawing: Drawing) -> None:
        """One token for the first `rows` sequences, whose contexts lie in their first `blocks` blocks."""
        size, numbers, table_SB = self.cache.block_size, self.numbers[:, :rows], self.table[:rows, :blocks]
        position_S = numbers[POSITION]
        place_S = places(position_S, table_SB, size)
        scratch, counters = self.cache.scratch, self.counters

        def attend(layer: int, heads: Heads) -> Tensor:
            (keys, values, scales), window = self.cache.layer(layer), self.model.arch.windows[layer]
            q_SHd = turned_into_cache(heads, keys, values, place_S, scales)
            return paged_attention(q_SHd, keys, values, table_SB, position_S, size, window, scratch, counters, scales)

        hidden_SD = self.model.run(numbers[TOKEN], position_S, attend, noise)
        seen_SV = self.seen_SV[:rows] if drawing.penalizes and self.seen_SV is not None else None
        drawn = drawing.draw(self.model.logits(hidden_SD), numbers[KEY], numbers[DRAWN], seen_SV)
        advance(numbers, self.at, self.tokens[:, :rows], self.logprobs[:, :, :rows], drawn)
        if seen_SV is not None:
            seen_SV.scatter_(1, drawn[0][:, None], True)

    def results(self, steps: int) -> tuple[list[Sequence | None], Tensor, Tensor]:
        """Who has which row; tokens int64 [S, L] and log-probs float32 [2, S, L], as drawn and before filters, of the
        steps since `fill` or `go_on`, to be overwritten by the next ones."""
        rows = self.used
        owners = self.rows.owners[:rows]
        return owners, self.tokens[:steps, :rows].t(), self.logprobs[:, :steps, :rows].transpose(1, 2)

    def _sent(self, numbers: list[int]) -> Tensor:
        """On the device. Through pinned memory: else the host would wait for the steps under way."""
        host = torch.tensor(numbers, dtype=torch.int64, pin_memory=self.model.device.type == "cuda")
        return host.to(self.model.device, non_blocking=True)


def mark_seen(seen_SV: Tensor, sequences: Series[Sequence]) -> None:
    """Which tokens each sequence holds, prompt included."""
    seen_SV.zero_()
    rows = [i for i, sequence in enumerate(sequences) for _ in range(len(sequence))]
    tokens = [token for sequence in sequences for token in sequence.tokens(0, len(sequence))]
    seen_SV[torch.tensor(rows, device=seen_SV.device), torch.tensor(tokens, device=seen_SV.device)] = True
