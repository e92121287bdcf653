"""The eager runner: a step's tokens through the decoder, keys and values in a paged cache."""

import torch
import torch.nn.functional as F
from torch import Tensor

from qerl.engine.scheduler import Chunk, Step
from qerl.model.decoder import Decoder


class Runner:
    """Holds the cache: for each layer [places, key/value heads, head size], place = block * block_size + offset."""

    def __init__(self, model: Decoder, num_blocks: int, block_size: int) -> None:
        self.model, self.block_size = model, block_size
        shape = (model.arch.layers, num_blocks * block_size, model.arch.kv_heads, model.arch.head_dim)
        self.keys = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.values = torch.zeros_like(self.keys)
        self.gathered = [self.keys.new_empty(0), self.values.new_empty(0)]

    @torch.no_grad()
    def run(self, step: Step, noise: bool) -> Tensor:
        """Float32 logits [S, V] of the chunks that sample, in their order."""
        for source, target in step.copies:
            for cache in (self.keys, self.values):
                at, to = source * self.block_size, target * self.block_size
                cache[:, to : to + self.block_size].copy_(cache[:, at : at + self.block_size])
        device = self.model.device
        # Decoding sequences first: they are attended in one batch.
        chunks = sorted(step.chunks, key=lambda chunk: chunk.count > 1)
        ids = [t for chunk in chunks for t in chunk.sequence.tokens(chunk.start, chunk.start + chunk.count)]
        positions = [p for chunk in chunks for p in range(chunk.start, chunk.start + chunk.count)]
        written = [place for chunk in chunks for place in self.places(chunk, chunk.start)]
        attention = _PagedAttention(self, chunks, torch.tensor(written, device=device))
        hidden_TD = self.model.run(
            torch.tensor(ids, device=device), torch.tensor(positions, device=device), attention, noise
        )
        ends, total = {}, 0
        for chunk in chunks:
            total += chunk.count
            ends[chunk.sequence] = total - 1
        rows = torch.tensor([ends[chunk.sequence] for chunk in step.chunks if chunk.samples], device=device)
        return self.model.logits(hidden_TD[rows.to(torch.int64)])

    def places(self, chunk: Chunk, start: int) -> list[int]:
        """Where the sequence's tokens lie, from `start` to the chunk's end."""
        size, blocks = self.block_size, chunk.sequence.blocks
        return [blocks[at // size] * size + at % size for at in range(start, chunk.start + chunk.count)]


class _PagedAttention:
    """attend(layer, q, k, v) for one step."""

    def __init__(self, runner: Runner, chunks: list[Chunk], written_T: Tensor) -> None:
        self.runner, self.chunks, self.written_T = runner, chunks, written_T
        self.singles = sum(chunk.count == 1 for chunk in chunks)
        device, size = written_T.device, runner.block_size
        self.contexts = [torch.tensor(runner.places(chunk, 0), device=device) for chunk in chunks[self.singles :]]
        if self.singles:
            starts = [chunk.start for chunk in chunks[: self.singles]]
            longest = max(starts) // size + 1  # in blocks
            tables = [chunk.sequence.blocks[:longest] for chunk in chunks[: self.singles]]
            padded = [table + [0] * (longest - len(table)) for table in tables]
            self.table_B = torch.tensor(padded, device=device).flatten()
            self.distance_SL = torch.tensor(starts, device=device)[:, None] - torch.arange(
                longest * size, device=device
            )

    def __call__(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor:
        keys, values = self.runner.keys[layer], self.runner.values[layer]
        keys[self.written_T] = k_TGd
        values[self.written_T] = v_TGd
        window = self.runner.model.arch.windows[layer]
        parts = []
        if self.singles:
            seen_SL = self.distance_SL >= 0
            if window is not None:
                seen_SL = seen_SL & (self.distance_SL < window)
            q = q_THd[: self.singles, :, None]  # [S, H, 1, d]
            k, v = (self._gather(cache, i) for i, cache in enumerate((keys, values)))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen_SL[:, None, None], enable_gqa=True)
            parts.append(out[:, :, 0])
        start = self.singles
        for chunk, context in zip(self.chunks[self.singles :], self.contexts, strict=True):
            q = q_THd[start : start + chunk.count].transpose(0, 1)[None]
            k, v = (cache[context].transpose(0, 1)[None] for cache in (keys, values))
            rows = torch.arange(chunk.start, chunk.start + chunk.count, device=q.device)
            distance = rows[:, None] - torch.arange(len(context), device=q.device)
            seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
            parts.append(out[0].transpose(0, 1))
            start += chunk.count
        return torch.cat(parts)

    def _gather(self, cache: Tensor, which: int) -> Tensor:
        """The decoding sequences' blocks side by side, in a buffer that is kept: [S, G, L, d]."""
        rows = cache.view(-1, self.runner.block_size * cache[0].numel())
        buffer = self.runner.gathered[which]
        if len(buffer) < len(self.table_B):
            buffer = self.runner.gathered[which] = rows.new_empty(len(self.table_B), rows.shape[1])
        blocks = torch.index_select(rows, 0, self.table_B, out=buffer[: len(self.table_B)])
        return blocks.view(self.singles, -1, *cache.shape[1:]).transpose(1, 2)
