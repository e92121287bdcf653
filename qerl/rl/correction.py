"""Importance weights for the difference between the sampler and the clean policy.

The sampler draws with noise, in the engine's rounding; the loss is the clean policy's. A token's weight is

    w = min(exp(old - behaviour), C)         old, behaviour: log-probs under the clean policy and under the sampler

without a gradient. Forms: `token` as above; `masked` sets weights above C to 0; `sequence` and `geometric` take one
weight a sequence, the product of its tokens' ratios or their geometric mean.
"""

import torch
from torch import Tensor


def importance_weights(
    old_N: Tensor, behaviour_N: Tensor, sequence_N: Tensor, form: str, cap: float
) -> tuple[Tensor, Tensor]:
    """Log-probs [N], sequence_N int64 (which sequence a token is of) -> weights [N], and bool [N]: touched by the
    cap."""
    difference_N = (old_N - behaviour_N).detach()
    if form == "off":
        return torch.ones_like(difference_N), torch.zeros_like(difference_N, dtype=torch.bool)
    if form in ("sequence", "geometric"):
        difference_N = sequence_sum(difference_N, sequence_N, mean=form == "geometric")[sequence_N]
    elif form not in ("token", "masked"):
        raise ValueError(f"There is no correction {form!r}; choose token, masked, sequence, geometric or off.")
    ratio_N = difference_N.exp()
    touched_N = ratio_N > cap
    return (ratio_N.masked_fill(touched_N, 0.0) if form == "masked" else ratio_N.clamp(max=cap)), touched_N


def sequence_sum(values_N: Tensor, sequence_N: Tensor, mean: bool = False) -> Tensor:
    """Sum or mean over each sequence's tokens: [N] -> [sequences]."""
    sequences = int(sequence_N[-1]) + 1
    total_S = torch.zeros(sequences, dtype=values_N.dtype, device=values_N.device).index_add(0, sequence_N, values_N)
    if not mean:
        return total_S
    return total_S / torch.bincount(sequence_N, minlength=sequences).clamp(min=1)
