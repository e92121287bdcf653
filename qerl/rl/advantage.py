"""Rewards to advantages: A = (r - mean of the group) / (std + 1e-4), the std unbiased."""

import torch
from torch import Tensor

EPSILON = 1e-4
NO_VARIANCE = 1e-6  # a std below this is none


def total_rewards(rewards_SF: Tensor, weights_F: Tensor) -> Tensor:
    """Weighted sum over reward functions [S]. NaN (a function that does not apply) counts 0; all NaN stays NaN."""
    total_S = (rewards_SF * weights_F).nansum(-1)
    return total_S.masked_fill(rewards_SF.isnan().all(-1), torch.nan)


def advantages(rewards_PG: Tensor, scale_rewards: str = "group") -> Tensor:
    """[P, G] -> [P, G]. scale_rewards: divide by the std of the group, of the batch, or none. NaN rewards count in no
    mean or std and get advantage 0."""
    centred_PG = rewards_PG - rewards_PG.nanmean(-1, keepdim=True)
    if scale_rewards == "group":
        centred_PG = centred_PG / (group_std(rewards_PG)[:, None] + EPSILON)
    elif scale_rewards == "batch":
        centred_PG = centred_PG / (group_std(rewards_PG.flatten()) + EPSILON)
    elif scale_rewards != "none":
        raise ValueError(f"scale_rewards is group, batch or none, not {scale_rewards!r}.")
    return centred_PG.nan_to_num(0.0)


def group_std(rewards_PG: Tensor) -> Tensor:
    """Unbiased std over the last dimension, NaN left out; 0 where fewer than two numbers are left."""
    count = rewards_PG.isfinite().sum(-1)
    deviation = (rewards_PG - rewards_PG.nanmean(-1, keepdim=True)).nan_to_num(0.0)
    return (deviation.square().sum(-1) / (count - 1).clamp(min=1)).sqrt()
