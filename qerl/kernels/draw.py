"""Drawing the next token by a temperature and filters, or greedily, with its log-probabilities.

A token is the first whose cumulative probability is larger than its random number. The kernel goes over the logits
once, in chunks of the vocabulary, then over the one chunk that holds the token; filters cost it some passes more.
"""

from torch import Tensor

from qerl.kernels.choice import fused
from qerl.kernels.sample import sample, uniforms


def draw(
    logits_SV: Tensor,
    keys_S: Tensor,
    drawn_S: Tensor,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    policy_SV: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """float32 logits [S, V], rows contiguous -> tokens int64 [S], their log-probs as drawn and before filters, float32.

    keys_S, drawn_S int64 [S]: name the random numbers, as in `uniforms`. temperature 0 takes the largest logit (the
    first of equals) whatever the filters, with the log-prob at temperature 1. policy_SV: the model's own logits, where
    those to draw from were changed.
    """
    if fused(logits_SV):
        from qerl.kernels.gpu import draw as gpu

        return gpu.draw(logits_SV, keys_S, drawn_S, temperature, top_k, top_p, min_p, policy_SV)
    return draw_reference(logits_SV, keys_S, drawn_S, temperature, top_k, top_p, min_p, policy_SV)


def draw_reference(
    logits_SV: Tensor,
    keys_S: Tensor,
    drawn_S: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    policy_SV: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return sample(logits_SV, uniforms(keys_S, drawn_S), temperature, top_k, top_p, min_p, policy_SV)
