"""Drawing without filters or penalties: temperature only, or greedy. The rest is in `sample`.

A token is the first whose cumulative probability is larger than its random number. The kernel goes over the logits
once, in chunks of the vocabulary, then over the one chunk that holds the token.
"""

from torch import Tensor

from qerl.kernels.choice import fused
from qerl.kernels.sample import sample, uniforms


def draw(logits_SV: Tensor, keys_S: Tensor, drawn_S: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """float32 logits [S, V], rows contiguous -> tokens int64 [S] and their log-probs float32 [S].

    keys_S, drawn_S int64 [S]: name the random numbers, as in `uniforms`. temperature 0 takes the largest logit (the
    first of equals), with the log-prob at temperature 1.
    """
    if fused(logits_SV):
        from qerl.kernels.gpu import draw as gpu

        return gpu.draw(logits_SV, keys_S, drawn_S, temperature)
    return draw_reference(logits_SV, keys_S, drawn_S, temperature)


def draw_reference(logits_SV: Tensor, keys_S: Tensor, drawn_S: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    tokens_S, logprob_S, _ = sample(logits_SV, uniforms(keys_S, drawn_S), temperature, 0, 1.0, 0.0)
    return tokens_S, logprob_S
