"""Adaptive quantization noise, the mechanism: Gaussian noise per input channel beside the norms' gains.

The noise lives in float32 buffers of its own, written in place, never in a gain: nothing accumulates and nothing has
to be undone. It is drawn on the CPU, so that every rank with the same generator state has the same noise on any device.
"""

from collections.abc import Iterator

import torch

from qerl.model.decoder import Decoder
from qerl.model.layers import RMSNorm


def set_noise(model: Decoder, sigma: float | list[float] | tuple[float, ...], generator: torch.Generator) -> None:
    """Draw z ~ N(0, sigma^2) for the input and post-attention norm of each block; sigma: one for all, or one a layer.

    A forward applies it when told `noise=True`.
    """
    sigmas = [float(s) for s in sigma] if isinstance(sigma, list | tuple) else [float(sigma)] * model.arch.layers
    if len(sigmas) != model.arch.layers:
        raise ValueError(f"{len(sigmas)} noise levels were given for {model.arch.layers} layers.")
    if any(not 0 <= s < float("inf") for s in sigmas):
        raise ValueError("Noise levels must be finite and not negative.")
    model.noise_version += 1
    for norm, s in zip(_noisy_norms(model), (s for s in sigmas for _ in range(2)), strict=True):
        assert norm.noise_D is not None
        norm.noise_D.copy_(torch.randn(norm.noise_D.shape, generator=generator, dtype=torch.float32) * s)


def clear_noise(model: Decoder) -> None:
    """Noise zero everywhere: forwards with noise=True are then bit for bit those without."""
    model.noise_version += 1
    for norm in _noisy_norms(model):
        assert norm.noise_D is not None
        norm.noise_D.zero_()


def _noisy_norms(model: Decoder) -> Iterator[RMSNorm]:
    norms = [module for module in model.modules() if isinstance(module, RMSNorm) and module.noise_D is not None]
    if len(norms) != 2 * model.arch.layers:
        raise ValueError(f"Noise needs two norms a layer that take it; this model has {len(norms)} in all.")
    return iter(norms)
