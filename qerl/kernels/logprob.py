"""Log-probability of target tokens, and entropy, straight from hidden states: the logits never exist as a whole.

    z_t = h_t W^T / temperature      logp_t = z_t[target_t] - logsumexp(z_t)      H_t = logsumexp(z_t) - sum_v p_tv z_tv

Tokens go through in chunks. With a frozen head, the forward forms each token's gradient from the logits it has at hand,
    d logp_t / d h_t = (W[target_t] - sum_v p_tv W[v]) / temperature
and keeps that, a vector of h's size and dtype: the backward only scales it, so two products are made in all, not three.
With a trained head it keeps logsumexp, a float a token, and the backward forms each chunk's logits again. Logits are
float32, also where hidden states and head are bf16. Entropy has no gradient: it is a measurement.
"""

from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 640 << 20  # float32 logits that exist at a time: with the gradient under 1 GB for 32k tokens
CPU_CHUNK_BYTES = 256 << 20  # on a CPU, where three such exist
CHUNK_STEP = 128  # tokens of a chunk are a multiple of this: rows that tensor cores take at a time
SCALED = 4096  # tokens whose gradient is scaled at a time, in float32


def logprob(
    hidden_TD: Tensor, head_VD: Tensor, targets_T: Tensor, temperature: float = 1.0, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """hidden_TD and head_VD of one dtype, targets_T int64 -> logp_T and entropy_T, float32.

    Gradients reach hidden_TD and, where it requires them, head_VD. chunk: tokens at a time; by default `chunk_tokens`.
    """
    if not temperature > 0:
        raise ValueError(f"Log-probabilities need a temperature above 0, not {temperature}.")
    if hidden_TD.shape[:1] != targets_T.shape:
        raise ValueError(f"{len(hidden_TD)} hidden states for {len(targets_T)} targets: index the hidden states first.")
    if (
        not targets_T.is_cuda
        and targets_T.numel()
        and not 0 <= int(targets_T.min()) <= int(targets_T.max()) < len(head_VD)
    ):
        raise ValueError(f"Targets must be token ids from 0 to {len(head_VD) - 1}; leave out what has no target.")
    size = chunk or chunk_tokens(head_VD.shape[0], CHUNK_BYTES if hidden_TD.is_cuda else CPU_CHUNK_BYTES)
    logp_T, entropy_T = _LogProb.apply(hidden_TD, head_VD, targets_T, temperature, size)  # type: ignore[no-untyped-call]
    return logp_T, entropy_T


def chunk_tokens(vocab: int, nbytes: int = CHUNK_BYTES) -> int:
    """How many tokens' logits exist at a time."""
    most = max(1, nbytes // (4 * vocab))
    return most // CHUNK_STEP * CHUNK_STEP or most


def logprob_reference(
    hidden_TD: Tensor, head_VD: Tensor, targets_T: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The same from whole logits, for tests."""
    logits_TV = float32_product(hidden_TD, head_VD) / temperature
    logp_TV = torch.log_softmax(logits_TV, dim=-1)
    return logp_TV.gather(1, targets_T[:, None])[:, 0], -(logp_TV.exp() * logp_TV).sum(-1)


def float32_product(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """a b^T in float32; 16-bit factors are accumulated and kept in float32."""
    if a_MK.dtype == torch.float32:
        return a_MK @ b_NK.t()
    if a_MK.is_cuda:
        return torch.mm(a_MK, b_NK.t(), out_dtype=torch.float32)
    return a_MK.to(torch.float32) @ b_NK.to(torch.float32).t()


def softmax_reference(
    logits_CV: Tensor,
    targets_C: Tensor,
    temperature: float,
    into: tuple[Tensor, Tensor, Tensor],
    dtype: torch.dtype | None,
) -> Tensor:
    """Writes log-prob of the targets, entropy and logsumexp, float32 [C] each, of logits / temperature, and returns
    onehot(targets) - p in dtype (None: nothing of use). The logits are lost."""
    logp_C, entropy_C, lse_C = into
    z_CV = logits_CV.div_(temperature)
    lse_C.copy_(torch.logsumexp(z_CV, dim=-1))
    logp_C.copy_(z_CV.gather(1, targets_C[:, None])[:, 0] - lse_C)
    p_CV = z_CV.sub_(lse_C[:, None]).exp()
    entropy_C.copy_(-torch.linalg.vecdot(p_CV, z_CV))
    if dtype is None:
        return p_CV
    p_CV.neg_().scatter_add_(1, targets_C[:, None], torch.ones_like(lse_C)[:, None])
    return p_CV.to(dtype)


def _softmax(
    logits_CV: Tensor,
    targets_C: Tensor,
    temperature: float,
    into: tuple[Tensor, Tensor, Tensor],
    dtype: torch.dtype | None,
) -> Tensor:
    if logits_CV.is_cuda:
        from qerl.kernels.gpu import logprob as gpu

        return gpu.softmax(logits_CV, targets_C, temperature, into, dtype)
    return softmax_reference(logits_CV, targets_C, temperature, into, dtype)


class _LogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, head_VD: Tensor, targets_T: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        logp_T = hidden_TD.new_empty(len(hidden_TD), dtype=torch.float32)
        entropy_T, lse_T = torch.empty_like(logp_T), torch.empty_like(logp_T)
        ctx.ready = ctx.needs_input_grad[0] and not ctx.needs_input_grad[1]
        gradient_TD = torch.empty_like(hidden_TD) if ctx.ready else None
        dtype = head_VD.dtype if ctx.ready else None
        for start in range(0, len(hidden_TD), chunk):
            at = slice(start, start + chunk)
            logits_CV = float32_product(hidden_TD[at], head_VD)
            into = (logp_T[at], entropy_T[at], lse_T[at])
            change_CV = _softmax(logits_CV, targets_T[at], temperature, into, dtype)
            if gradient_TD is not None:
                torch.mm(change_CV, head_VD, out=gradient_TD[at])
            del logits_CV, change_CV  # before the next chunk's
        kept = (gradient_TD,) if gradient_TD is not None else (hidden_TD, head_VD, targets_T, lse_T)
        ctx.save_for_backward(*kept)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(entropy_T)
        return logp_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        dlogp_T = grads[0]
        if ctx.ready:
            gradient_TD: Tensor = ctx.saved_tensors[0]
            for start in range(0, len(gradient_TD), SCALED):  # in place: it was kept for this alone
                part_SD = gradient_TD[start : start + SCALED]
                part_SD.copy_(part_SD * (dlogp_T[start : start + SCALED, None] / ctx.temperature))
            return gradient_TD.detach(), None, None, None, None
        hidden_TD, head_VD, targets_T, lse_T = ctx.saved_tensors
        dhidden_TD = torch.empty_like(hidden_TD) if ctx.needs_input_grad[0] else None
        dhead_VD = torch.zeros_like(head_VD, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden_TD), ctx.chunk):
            at = slice(start, start + ctx.chunk)
            scaled_C = dlogp_T[at, None] / ctx.temperature
            # d logp / d logits = onehot(target) - p
            dlogits_CV = float32_product(hidden_TD[at], head_VD).div_(ctx.temperature)
            dlogits_CV.sub_(lse_T[at, None]).exp_().mul_(-scaled_C)
            dlogits_CV.scatter_add_(1, targets_T[at, None], scaled_C)
            low_CV = dlogits_CV.to(head_VD.dtype)
            if dhidden_TD is not None:
                dhidden_TD[at] = low_CV @ head_VD
            if dhead_VD is not None:
                dhead_VD += float32_product(low_CV.t(), hidden_TD[at].t())
        return dhidden_TD, None if dhead_VD is None else dhead_VD.to(head_VD.dtype), None, None, None
