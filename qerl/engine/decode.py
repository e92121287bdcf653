"""One decode step over device buffers: reads the last tokens, draws the next ones, and is ready to be run again.

Nothing in a step looks at the host, so it can be captured in a graph and replayed; several steps go by between looks.
"""

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from qerl.engine.cache import Cache
from qerl.engine.drawing import Drawing
from qerl.engine.sequence import Sequence
from qerl.kernels.attention import paged_attention
from qerl.model.decoder import Decoder

TOKEN, POSITION, DRAWN, KEY, TABLE = 0, 1, 2, 3, 4  # columns of the state


class DecodeBatch:
    """state: int64 [rows, 4 + blocks]: last token, its position, tokens drawn, random numbers' key, block table."""

    def __init__(self, model: Decoder, cache: Cache, rows: int, most_blocks: int, lookahead: int) -> None:
        self.model, self.cache, self.most_blocks = model, cache, most_blocks
        device = model.device
        self.state = torch.zeros(rows, TABLE + most_blocks, dtype=torch.int64, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)  # which step since the last look
        self.tokens = torch.zeros(lookahead, rows, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(2, lookahead, rows, dtype=torch.float32, device=device)
        self.seen_SV: Tensor | None = None

    def fill(self, sequences: Rows[Sequence], rows: int, blocks: int, drawing: Drawing) -> None:
        """Bring the sequences' state to the device; rows beyond them write to the trash block."""
        trash = self.cache.trash
        host = [
            [q.last, len(q) - 1, len(q.output), q.key, *q.blocks[:blocks], *[trash] * (blocks - len(q.blocks))]
            for q in sequences
        ]
        host += [[0, 0, 0, 0, *[trash] * blocks]] * (rows - len(host))
        self.state[:rows, : TABLE + blocks].copy_(torch.tensor(host, dtype=torch.int64))
        self.at.zero_()
        if drawing.penalizes:
            if self.seen_SV is None:
                self.seen_SV = torch.zeros(
                    len(self.state), self.model.arch.vocab, dtype=torch.bool, device=self.model.device
                )
            mark_seen(self.seen_SV[:rows], sequences)

    @torch.no_grad()
    def step(self, rows: int, blocks: int, noise: bool, drawing: Drawing) -> None:
        """One token for the first `rows` sequences, whose contexts lie in their first `blocks` blocks."""
        state, size = self.state[:rows], self.cache.block_size
        position_S, table_SB = state[:, POSITION], state[:, TABLE : TABLE + blocks]
        block_S = table_SB.gather(1, (position_S // size)[:, None])[:, 0]
        place_S = block_S * size + position_S % size

        def attend(layer: int, q_SHd: Tensor, k_SGd: Tensor, v_SGd: Tensor) -> Tensor:
            keys, values = self.cache.keys[layer], self.cache.values[layer]
            keys[place_S], values[place_S] = k_SGd, v_SGd
            window = self.model.arch.windows[layer]
            return paged_attention(q_SHd, keys, values, table_SB, position_S, size, window, self.cache.scratch)

        hidden_SD = self.model.run(state[:, TOKEN], position_S, attend, noise)
        seen_SV = self.seen_SV[:rows] if drawing.penalizes and self.seen_SV is not None else None
        tokens_S, *logprobs = drawing.draw(self.model.logits(hidden_SD), state[:, KEY], state[:, DRAWN], seen_SV)
        self.tokens[:, :rows].index_copy_(0, self.at, tokens_S[None])
        self.logprobs[:, :, :rows].index_copy_(1, self.at, torch.stack(logprobs)[:, None])
        if seen_SV is not None:
            seen_SV.scatter_(1, tokens_S[:, None], True)
        state[:, TOKEN] = tokens_S
        state[:, POSITION : DRAWN + 1] += 1
        self.at += 1

    def read(self, steps: int, rows: int) -> tuple[list[list[int]], list[list[float]], list[list[float]]]:
        """Tokens, log-probs as drawn and before filters of the steps since `fill`; a list a sequence."""
        drawn, policy = self.logprobs[:, :steps, :rows].transpose(1, 2).tolist()
        return self.tokens[:steps, :rows].t().tolist(), drawn, policy


def mark_seen(seen_SV: Tensor, sequences: Rows[Sequence]) -> None:
    """Which tokens each sequence holds, prompt included."""
    seen_SV.zero_()
    rows = [i for i, sequence in enumerate(sequences) for _ in range(len(sequence))]
    tokens = [token for sequence in sequences for token in sequence.tokens(0, len(sequence))]
    seen_SV[torch.tensor(rows, device=seen_SV.device), torch.tensor(tokens, device=seen_SV.device)] = True
