"""What surrounds the model in a decode step: where the new tokens go in the cache, and the state after them."""

import torch
from torch import Tensor

from qerl.kernels.choice import fused

TOKEN, POSITION, DRAWN, KEY = 0, 1, 2, 3  # rows of the numbers


def places(position_S: Tensor, table_SB: Tensor, block_size: int) -> Tensor:
    """The cache's place of each sequence's position, int64 [S], contiguous.

    position_S int64 [S], contiguous; table_SB int64 [S, B], rows contiguous: each sequence's blocks in order.
    """
    if fused(position_S):
        from qerl.kernels.gpu import decode_state as gpu

        return gpu.places(position_S, table_SB, block_size)
    block_S = table_SB.gather(1, (position_S // block_size)[:, None])[:, 0]
    return block_S * block_size + position_S % block_size


def advance(
    numbers_4S: Tensor, at: Tensor, tokens_LS: Tensor, logprobs_2LS: Tensor, drawn: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Keep what a step drew and be ready for the next, all in place.

    numbers_4S int64: last token, position, tokens drawn, key of each sequence; at int64 [1]: steps since the last look;
    tokens_LS int64, logprobs_2LS float32: what they drew; drawn: the step's tokens int64 [S], log-probs as drawn and
    before filters, float32 [S]. The last dimension of each is contiguous.
    """
    if fused(numbers_4S):
        from qerl.kernels.gpu import decode_state as gpu

        return gpu.advance(numbers_4S, at, tokens_LS, logprobs_2LS, drawn)
    tokens_LS.index_copy_(0, at, drawn[0][None])
    logprobs_2LS.index_copy_(1, at, torch.stack(drawn[1:])[:, None])
    numbers_4S[TOKEN] = drawn[0]
    numbers_4S[POSITION : DRAWN + 1] += 1
    at += 1
    return None
