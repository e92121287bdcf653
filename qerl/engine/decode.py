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
        self.at = torch.zeros(1, dtype=torch.int64, device=device)  # which step since the last look
        self.tokens = torch.zeros(lookahead, rows, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(2, lookahead, rows, dtype=torch.float32, device=device)
        self.counters = torch.zeros(rows * model.arch.kv_heads, dtype=torch.int32, device=device)
        self.seen_SV: Tensor | None = None

    def fill(self, sequences: Series[Sequence], rows: int, drawing: Drawing) -> list[Sequence]:
        """Bring the sequences' state to the first `rows` rows of the device; returns them in the order of the rows.

        Rows beyond them write to the trash block.
        """
        seated = self.rows.seat(sequences)
        at, blocks = self.rows.changes(rows)
        empty = [0] * (rows - len(seated))
        host = [q.last for q in seated] + empty
        host += [len(q) - 1 for q in seated] + empty
        host += [len(q.output) for q in seated] + empty
        host += [q.key for q in seated] + empty
        sent = torch.tensor(host + at + blocks, dtype=torch.int64).to(self.model.device)
        numbers, index, held = sent[: 4 * rows], sent[4 * rows : 4 * rows + len(at)], sent[4 * rows + len(at) :]
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
        return seated

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

    def read(self, steps: int, rows: int) -> tuple[list[list[int]], list[list[float]], list[list[float]]]:
        """Tokens, log-probs as drawn and before filters of the steps since `fill`; a list a row."""
        drawn, policy = self.logprobs[:, :steps, :rows].transpose(1, 2).tolist()
        return self.tokens[:steps, :rows].t().tolist(), drawn, policy


def mark_seen(seen_SV: Tensor, sequences: Series[Sequence]) -> None:
    """Which tokens each sequence holds, prompt included."""
    seen_SV.zero_()
    rows = [i for i, sequence in enumerate(sequences) for _ in range(len(sequence))]
    tokens = [token for sequence in sequences for token in sequence.tokens(0, len(sequence))]
    seen_SV[torch.tensor(rows, device=seen_SV.device), torch.tensor(tokens, device=seen_SV.device)] = True
