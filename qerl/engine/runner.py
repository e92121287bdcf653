"""A step's tokens through the decoder, eagerly: chunks of prompts, and decoding sequences beside them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from qerl.engine.cache import Cache
from qerl.engine.decode import mark_seen
from qerl.engine.drawing import Drawing
from qerl.engine.scheduler import Chunk, Step
from qerl.engine.sequence import Sequence
from qerl.kernels.attention import paged_attention
from qerl.model.decoder import Decoder


class Runner:
    """Runs steps that mix prefill and decode; pure decode steps are `DecodeBatch`'s."""

    def __init__(self, model: Decoder, cache: Cache) -> None:
        self.model, self.cache = model, cache

    @torch.no_grad()
    def run(self, step: Step, noise: bool, drawing: Drawing) -> dict[Sequence, tuple[int, float, float]]:
        """For each sequence whose chunk samples: its next token, log-prob as drawn, log-prob before filters."""
        device = self.model.device
        # Single tokens first: they are attended in one batch.
        chunks = sorted(step.chunks, key=lambda chunk: chunk.count > 1)
        ids = [t for chunk in chunks for t in chunk.sequence.tokens(chunk.start, chunk.start + chunk.count)]
        positions = [p for chunk in chunks for p in range(chunk.start, chunk.start + chunk.count)]
        attention = _MixedAttention(self, chunks, torch.tensor(positions, device=device))
        hidden_TD = self.model.run(torch.tensor(ids, device=device), attention.positions_T, attention, noise)
        sampling, ends, total = [], [], 0
        for chunk in chunks:
            total += chunk.count
            if chunk.samples:
                sampling.append(chunk.sequence)
                ends.append(total - 1)
        if not sampling:
            return {}
        keys_S = torch.tensor([q.key for q in sampling], dtype=torch.int64, device=device)
        drawn_S = torch.tensor([len(q.output) for q in sampling], dtype=torch.int64, device=device)
        seen_SV = None
        if drawing.penalizes:
            seen_SV = torch.zeros(len(sampling), self.model.arch.vocab, dtype=torch.bool, device=device)
            mark_seen(seen_SV, sampling)
        logits_SV = self.model.logits(hidden_TD[torch.tensor(ends, device=device)])
        drawn = (values.tolist() for values in drawing.draw(logits_SV, keys_S, drawn_S, seen_SV))
        return dict(zip(sampling, zip(*drawn, strict=True), strict=True))

    def places(self, chunk: Chunk, start: int) -> list[int]:
        """Where the sequence's tokens lie, from `start` to the chunk's end."""
        size, blocks = self.cache.block_size, chunk.sequence.blocks
        return [blocks[at // size] * size + at % size for at in range(start, chunk.start + chunk.count)]


class _MixedAttention:
    """attend(layer, q, k, v) for one step: its single tokens in one batch, then each longer chunk."""

    def __init__(self, runner: Runner, chunks: list[Chunk], positions_T: Tensor) -> None:
        self.cache, self.windows, self.positions_T = runner.cache, runner.model.arch.windows, positions_T
        device, size = positions_T.device, runner.cache.block_size
        self.singles = sum(chunk.count == 1 for chunk in chunks)
        self.longer = chunks[self.singles :]
        self.written_T = torch.tensor([p for chunk in chunks for p in runner.places(chunk, chunk.start)], device=device)
        self.contexts = [torch.tensor(runner.places(chunk, 0), device=device) for chunk in self.longer]
        if self.singles:
            single = chunks[: self.singles]
            longest = max(chunk.start for chunk in single) // size + 1  # in blocks
            tables = [chunk.sequence.blocks[:longest] for chunk in single]
            padded = [table + [self.cache.trash] * (longest - len(table)) for table in tables]
            self.table_SB = torch.tensor(padded, device=device)

    def __call__(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor:
        keys, values, window = self.cache.keys[layer], self.cache.values[layer], self.windows[layer]
        keys[self.written_T] = k_TGd
        values[self.written_T] = v_TGd
        parts, start = [], self.singles
        if self.singles:
            q_SHd, position_S, size = q_THd[:start], self.positions_T[:start], self.cache.block_size
            parts.append(
                paged_attention(q_SHd, keys, values, self.table_SB, position_S, size, window, self.cache.scratch)
            )
        for chunk, context in zip(self.longer, self.contexts, strict=True):
            rows = slice(start, start + chunk.count)
            q = q_THd[rows].transpose(0, 1)[None]
            k, v = (cache[context].transpose(0, 1)[None] for cache in (keys, values))
            distance = self.positions_T[rows, None] - torch.arange(len(context), device=q.device)
            seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
            parts.append(out[0].transpose(0, 1))
            start += chunk.count
        return torch.cat(parts)
