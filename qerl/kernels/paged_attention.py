"""Decode attention: one query a sequence over a paged cache.

    out = softmax(q K^T / sqrt(d)) V        over the places of the sequence's positions up to its own

The kernel reads lengths on the device and splits each context among programs; nothing depends on the host, so that one
captured graph serves every length. What other rows hold never changes a row's result; how many rows there are decides
only how its float32 sums are split.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from qerl.kernels.choice import fused
from qerl.kernels.fp8_cache import from_fp8


def paged_attention(
    q_SHd: Tensor,
    keys_PGd: Tensor,
    values_PGd: Tensor,
    table_SB: Tensor,
    position_S: Tensor,
    block_size: int,
    window: int | None = None,
    scratch: list[Tensor] | None = None,
    counters: Tensor | None = None,
    scales_2PG: Tensor | None = None,
) -> Tensor:
    """q [S, H, d] -> [S, H, d] in the same dtype, contiguous both.

    keys_PGd, values_PGd: the cache, contiguous, H a multiple of G, place = block * block_size + offset; table_SB int64,
    any row stride: each sequence's blocks in order; position_S int64, any stride: a query sees the places of positions
    up to its own. window: only the last so many of them, itself included. scratch: for the reference, two tensors, kept
    and grown, for the gathered keys and values. counters: for the kernel, int32 zeros, at least S * G, zeros again
    afterwards; without them every call makes its own. scales_2PG: float32, contiguous: keys and values are FP8 codes
    (`fp8_cache`), and these are the scales of either.
    """
    if fused(q_SHd, keys_PGd, values_PGd):
        from qerl.kernels.gpu import paged_attention as gpu

        args = (q_SHd, keys_PGd, values_PGd, table_SB, position_S, block_size, window)
        return gpu.paged_attention(*args, counters=counters, scales_2PG=scales_2PG)
    return paged_attention_reference(
        q_SHd, keys_PGd, values_PGd, table_SB, position_S, block_size, window, scratch, scales_2PG
    )


def paged_attention_reference(
    q_SHd: Tensor,
    keys_PGd: Tensor,
    values_PGd: Tensor,
    table_SB: Tensor,
    position_S: Tensor,
    block_size: int,
    window: int | None = None,
    scratch: list[Tensor] | None = None,
    scales_2PG: Tensor | None = None,
) -> Tensor:
    """Gathers each sequence's blocks, then a standard attention with a mask."""
    sequences, blocks = table_SB.shape
    distance_SL = position_S[:, None] - torch.arange(blocks * block_size, device=q_SHd.device)
    seen_SL = distance_SL >= 0
    if window is not None:
        seen_SL = seen_SL & (distance_SL < window)

    def gather(cache_PGd: Tensor, which: int) -> Tensor:
        """The sequences' blocks side by side: [S, G, L, d]."""
        held = cache_PGd if scales_2PG is None else cache_PGd.view(torch.uint8)
        rows = held.view(-1, block_size * held[0].numel())
        index = table_SB.flatten()
        if scratch is None or q_SHd.is_cuda:
            found = rows.index_select(0, index)
        else:  # a CPU spends more on fresh pages than on the copy
            if len(scratch[which]) < len(index):
                scratch[which] = rows.new_empty(len(index), rows.shape[1])
            found = torch.index_select(rows, 0, index, out=scratch[which][: len(index)])
        found = found.view(cache_PGd.dtype).view(sequences, -1, *cache_PGd.shape[1:]).transpose(1, 2)
        if scales_2PG is None:
            return found
        scales = scales_2PG[which].view(-1, block_size, scales_2PG.shape[-1])[index]
        return from_fp8(found, scales.view(sequences, -1, scales.shape[-1]).transpose(1, 2), q_SHd.dtype)

    k, v = gather(keys_PGd, 0), gather(values_PGd, 1)
    mask = seen_SL[:, None, None]
    return F.scaled_dot_product_attention(q_SHd[:, :, None], k, v, attn_mask=mask, enable_gqa=True)[:, :, 0]
