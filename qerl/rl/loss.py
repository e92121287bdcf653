"""The policy loss over packed completion tokens.

    r = exp(logp - old)                                  `sequence`: the geometric mean of its tokens' ratios (GSPO)
    clipped:  -min(r A, clip(r, 1 - eps, 1 + eps_high) A) w            cispo:  -min(r, eps_high).detach() A logp w
    KL:       exp(ref - logp) - (ref - logp) - 1, times r, weighted by beta

A loss is a sum over tokens with one coefficient each, set from the whole update before anything is cut into micro-
batches: so neither their size nor the number of GPUs changes the gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl.rl.correction import sequence_sum

CISPO_CAP = 5.0


@dataclass(frozen=True)
class LossSettings:
    """Names and meanings as in TRL's GRPOConfig."""

    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    beta: float = 0.0
    max_completion_length: int = 256

    @property
    def high(self) -> float:
        if self.epsilon_high is not None:
            return self.epsilon_high
        return CISPO_CAP if self.loss_type == "cispo" else self.epsilon


def coefficients(settings: LossSettings, lengths: Sequence[int]) -> list[float]:
    """What a token of each sequence counts in the loss. lengths: tokens in the loss of every sequence of the update; 0
    for one that is masked, which still counts as a sequence.

    grpo: mean of sequence means. dapo, bnpo, cispo: mean over tokens. dr_grpo: over sequences times the longest length
    allowed.
    """
    count, tokens = len(lengths), max(1, sum(lengths))
    kind = settings.loss_type
    if kind == "grpo":
        return [1.0 / (count * length) if length else 0.0 for length in lengths]
    if kind == "dr_grpo":
        return [1.0 / (count * settings.max_completion_length) if length else 0.0 for length in lengths]
    if kind in ("dapo", "bnpo", "cispo"):
        return [1.0 / tokens if length else 0.0 for length in lengths]
    raise ValueError(f"There is no loss {kind!r}; choose grpo, dapo, dr_grpo, bnpo or cispo.")


@dataclass(frozen=True)
class TokenLoss:
    """The loss, and what happened to each token (no gradients)."""

    loss: Tensor  # scalar: this micro-batch's share of the update's loss
    low_clipped_N: Tensor  # bool
    high_clipped_N: Tensor  # bool
    kl_N: Tensor | None


def policy_loss(
    settings: LossSettings,
    logp_N: Tensor,
    old_N: Tensor,
    advantage_N: Tensor,
    coefficient_N: Tensor,
    sequence_N: Tensor,
    weight_N: Tensor | None = None,
    ref_N: Tensor | None = None,
) -> TokenLoss:
    """All [N], over the completion tokens of whole sequences; sequence_N int64 counts them from 0. Gradients:
    logp_N."""
    log_ratio_N = logp_N - old_N
    if settings.importance_sampling_level == "sequence":
        log_ratio_N = sequence_sum(log_ratio_N, sequence_N, mean=True)[sequence_N]
    elif settings.importance_sampling_level != "token":
        raise ValueError(f"There is no importance sampling level {settings.importance_sampling_level!r}.")
    ratio_N = log_ratio_N.exp()
    if settings.loss_type == "cispo":
        loss_N = -ratio_N.clamp(max=settings.high).detach() * advantage_N * logp_N
        low_N, high_N = torch.zeros_like(ratio_N, dtype=torch.bool), (ratio_N > settings.high) & (advantage_N > 0)
    else:
        clipped_N = ratio_N.clamp(1 - settings.epsilon, 1 + settings.high)
        loss_N = -torch.min(ratio_N * advantage_N, clipped_N * advantage_N)
        low_N = (ratio_N < 1 - settings.epsilon) & (advantage_N < 0)
        high_N = (ratio_N > 1 + settings.high) & (advantage_N > 0)
    if weight_N is not None:
        loss_N = loss_N * weight_N
    kl_N = None
    if settings.beta:
        assert ref_N is not None, "a KL needs the reference's log-probs"
        kl_N = ((ref_N - logp_N).exp() - (ref_N - logp_N) - 1) * ratio_N
        loss_N = loss_N + settings.beta * kl_N
        kl_N = kl_N.detach()
    return TokenLoss((loss_N * coefficient_N).sum(), low_N, high_N, kl_N)
