"""A step's tokens through the decoder, eagerly: chunks of prompts, and decoding sequences beside them."""

from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from qerl.engine.cache import Cache
from qerl.engine.decode import mark_seen
from qerl.engine.drawing import Drawing
from qerl.engine.scheduler import Chunk, Step
from qerl.engine.sequence import Sequence
from qerl.kernels.attention import packed_attention
from qerl.kernels.heads import Heads, turned_into_cache
from qerl.kernels.paged_attention import paged_attention
from qerl.model.decoder import Decoder


class Runner:
    """Runs steps that mix prefill and decode; pure decode steps are `DecodeBatch`'s."""

    def __init__(self, model: Decoder, cache: Cache) -> None:
        self.model, self.cache = model, cache

    @torch.no_grad()
    def run(self, step: Step, noise: bool, drawing: Drawing) -> tuple[list[Sequence], Tensor, Tensor]:
        """The sequences whose chunk samples; their next tokens int64 [S, 1], log-probs as drawn and before filters
        float32 [2, S, 1]."""
        device = self.model.device
        # Single tokens first: they are attended in one batch.
        chunks = sorted(step.chunks, key=lambda chunk: chunk.length > 1)
        ids = [t for chunk in chunks for t in chunk.sequence.tokens(chunk.start, chunk.start + chunk.length)]
        positions = np.concatenate([np.arange(chunk.start, chunk.start + chunk.length) for chunk in chunks])
        attention = _MixedAttention(self, chunks, torch.from_numpy(positions).to(device))
        hidden_TD = self.model.run(torch.tensor(ids, device=device), attention.positions_T, attention, noise)
        sampling, ends, total = [], [], 0
        for chunk in chunks:
            total += chunk.length
            if chunk.samples:
                sampling.append(chunk.sequence)
                ends.append(total - 1)
        if not sampling:
            return [], torch.empty(0, 1, dtype=torch.int64), torch.empty(2, 0, 1)
        keys_S = torch.tensor([q.key for q in sampling], dtype=torch.int64, device=device)
        drawn_S = torch.tensor([len(q.output) for q in sampling], dtype=torch.int64, device=device)
        seen_SV = None
        if drawing.penalizes:
            seen_SV = torch.zeros(len(sampling), self.model.arch.vocab, dtype=torch.bool, device=device)
            mark_seen(seen_SV, sampling)
        logits_SV = self.model.logits(hidden_TD[torch.tensor(ends, device=device)])
        tokens_S, logprobs_S, policy_S = drawing.draw(logits_SV, keys_S, drawn_S, seen_SV)
        return sampling, tokens_S[:, None], torch.stack((logprobs_S, policy_S))[:, :, None]

    def places(self, chunk: Chunk, start: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """Where the sequence's tokens lie, from `start` to the chunk's end."""
        size, at = self.cache.block_size, np.arange(start, chunk.start + chunk.length)
        blocks = np.array(chunk.sequence.blocks[: (chunk.start + chunk.length - 1) // size + 1], dtype=np.int64)
        found: np.ndarray[tuple[int], np.dtype[np.int64]] = blocks[at // size] * size + at % size
        return found


class _MixedAttention:
    """attend(layer, heads) for one step: its single tokens in one batch, then all longer chunks in another."""

    def __init__(self, runner: Runner, chunks: list[Chunk], positions_T: Tensor) -> None:
        self.cache, self.windows, self.positions_T = runner.cache, runner.model.arch.windows, positions_T
        device, size = positions_T.device, runner.cache.block_size
        self.singles = sum(chunk.length == 1 for chunk in chunks)
        single, longer = chunks[: self.singles], chunks[self.singles :]
        written = np.concatenate([runner.places(chunk, chunk.start) for chunk in chunks])
        self.written_T = torch.from_numpy(written).to(device)
        if single:
            longest = max(chunk.start for chunk in single) // size + 1  # in blocks
            tables = [chunk.sequence.blocks[:longest] for chunk in single]
            padded = [table + [self.cache.trash] * (longest - len(table)) for table in tables]
            self.table_SB = torch.tensor(padded, device=device)
        self.lengths = tuple(chunk.length for chunk in longer)
        if longer:  # their keys and values, from the first position on, are gathered from the cache
            self.context_K = torch.from_numpy(np.concatenate([runner.places(chunk, 0) for chunk in longer])).to(device)
            self.key_lengths = tuple(chunk.start + chunk.length for chunk in longer)
            self.bounds, self.key_bounds = (
                torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
                for lengths in (self.lengths, self.key_lengths)
            )

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        (keys, values, scales), window, scratch = self.cache.layer(layer), self.windows[layer], self.cache.scratch
        q_THd = turned_into_cache(heads, keys, values, self.written_T, scales)
        parts, single = [], self.singles
        if single:
            q_SHd, position_S, size = q_THd[:single], self.positions_T[:single], self.cache.block_size
            args = (q_SHd, keys, values, self.table_SB, position_S, size, window, scratch)
            parts.append(paged_attention(*args, scales_2PG=scales))
        if self.lengths:
            k_KGd, v_KGd = self.cache.read(layer, self.context_K)
            ends, lengths = (self.bounds, self.key_bounds), (self.lengths, self.key_lengths)
            parts.append(packed_attention(q_THd[single:], k_KGd, v_KGd, ends, lengths, window))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
