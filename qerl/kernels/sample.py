"""Drawing the next token from logits, with its log-probabilities.

The random number of a token is a hash of (run seed, rollout, request, sample, position): it depends on nothing else, so
that another batch around a sequence draws the same token, the first whose cumulative probability is larger. The hash is
splitmix64's finaliser, once for each number: for the first four on the host, once a sequence, for the position on the
device.
"""

import torch
from torch import Tensor

MASK = (1 << 64) - 1


def stream_key(*numbers: int) -> int:
    """A hash of integers, as a signed 64-bit number."""
    state = 0
    for number in numbers:
        state = (state + (number & MASK) + 0x9E3779B97F4A7C15) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return _signed(state)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def uniforms(keys_S: Tensor, positions_S: Tensor) -> Tensor:
    """int64 keys and positions -> numbers in [0, 1), float64: the hash's last round, in wrapping 64-bit arithmetic."""

    def shifted(state: Tensor, bits: int) -> Tensor:  # to the right, zeros coming in
        return (state >> bits) & ((1 << (64 - bits)) - 1)

    state = keys_S + positions_S + _signed(0x9E3779B97F4A7C15)
    state = (state ^ shifted(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ shifted(state, 27)) * _signed(0x94D049BB133111EB)
    state = state ^ shifted(state, 31)
    return shifted(state, 11).to(torch.float64) / (1 << 53)


def penalize(logits_SV: Tensor, seen_SV: Tensor, penalty: float) -> Tensor:
    """Repetition penalty as transformers has it: logits of seen tokens divided (positive) or multiplied (negative)."""
    return torch.where(seen_SV, torch.where(logits_SV > 0, logits_SV / penalty, logits_SV * penalty), logits_SV)


def filtered(scaled_SV: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Temperature-scaled logits with what the filters exclude at -inf, in the order top-k, top-p, min-p.

    Of tokens with the same logit all stay or none, so that nothing depends on how a sort orders equals.
    """
    if top_k and top_k < scaled_SV.shape[1]:
        smallest = scaled_SV.topk(top_k, dim=-1).values[:, -1:]
        scaled_SV = scaled_SV.masked_fill(scaled_SV < smallest, -torch.inf)
    if top_p < 1.0:
        ordered = scaled_SV.sort(dim=-1, descending=True).values
        p = ordered.double().softmax(-1)
        before = p.cumsum(-1) - p  # mass of the more likely tokens
        smallest = ordered.masked_fill(before >= top_p, torch.inf).amin(-1, keepdim=True)
        scaled_SV = scaled_SV.masked_fill(scaled_SV < smallest, -torch.inf)
    if min_p > 0.0:
        p = scaled_SV.softmax(-1)
        scaled_SV = scaled_SV.masked_fill(p < min_p * p.amax(-1, keepdim=True), -torch.inf)
    return scaled_SV


def sample(
    logits_SV: Tensor,
    uniforms_S: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    policy_SV: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """float32 logits, numbers in [0, 1) -> tokens, log-prob as drawn, log-prob before filters; [S] each.

    policy_SV: the model's own logits, where those to draw from were changed (penalty, no early stop). Temperature 0
    takes the largest logit; its log-probabilities are those at temperature 1.
    """
    factor = temperature if temperature > 0 else 1.0
    scaled_SV = logits_SV / factor
    own_SV = scaled_SV if policy_SV is None or policy_SV is logits_SV else policy_SV / factor
    own_SV = torch.log_softmax(own_SV, dim=-1)
    if temperature == 0:
        tokens_S = logits_SV.argmax(-1)
        kept_SV = torch.log_softmax(scaled_SV, dim=-1)
    else:
        kept_SV = torch.log_softmax(filtered(scaled_SV, top_k, top_p, min_p), dim=-1)
        cumulative_SV = kept_SV.double().exp().cumsum(-1)
        mark_S1 = uniforms_S.double()[:, None] * cumulative_SV[:, -1:]
        tokens_S = torch.searchsorted(cumulative_SV, mark_S1, right=True)[:, 0].clamp_(max=logits_SV.shape[1] - 1)
    at_S1 = tokens_S[:, None]
    return tokens_S, kept_SV.gather(1, at_S1)[:, 0], own_SV.gather(1, at_S1)[:, 0]
