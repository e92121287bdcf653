"""What changes over a run: the noise's sigma, and the learning rate. Functions of the step alone, but for the closed
loop.

Noise: K stages of equal length, stage 0 clean; stage i + 1 has, with t = i / max(1, K - 2) and s, e the ends,

    exponential s (e/s)^t     linear s + (e - s) t     cosine e + (s - e)(1 + cos pi t)/2
    logarithmic s + (e - s) log(1 + 9 t)/log 10        constant s

The closed loop holds the clean policy's entropy H at a target H*: sigma <- clip(sigma exp(eta (H* - H)/H*), lo, hi).
"""

import math
from dataclasses import dataclass

from qerl.config import Config, NoiseConfig


def stage_of(step: int, total: int, num_stages: int) -> int:
    """Stage of a step (both from 0); steps past the end stay in the last stage."""
    return min(step * num_stages // max(1, total), num_stages - 1)


def stage_sigma(config: NoiseConfig, stage: int) -> float:
    """Sigma of a stage by the open-loop schedules."""
    if config.schedule == "off" or stage == 0:
        return 0.0
    t = (stage - 1) / max(1, config.num_stages - 2)
    s, e = config.sigma_start, config.sigma_end
    curves: dict[str, float] = {
        "exponential": s * (e / s) ** t,
        "linear": s + (e - s) * t,
        "cosine": e + (s - e) * (1 + math.cos(math.pi * t)) / 2,
        "logarithmic": s + (e - s) * math.log(1 + 9 * t) / math.log(10),
        "constant": s,
    }
    return curves[config.schedule]


def layer_sigmas(config: NoiseConfig, sigma: float, layers: int) -> list[float]:
    """Sigma of each layer by the profile over depth."""
    if config.profile == "uniform":
        return [sigma] * layers
    if config.profile == "linear":  # from 2/(L + 1) to 2L/(L + 1): mean 1
        return [sigma * 2 * (layer + 1) / (layers + 1) for layer in range(layers)]
    factors = config.profile
    assert not isinstance(factors, str)
    if len(factors) != layers or min(factors) < 0:
        raise ValueError(f"noise.profile needs {layers} factors of 0 or more, one a layer; it has {len(factors)}.")
    return [sigma * factor for factor in factors]


@dataclass
class NoiseLevel:
    """The noise of a run. `sigma` and `target` are the closed loop's state, saved with a checkpoint."""

    config: NoiseConfig
    total_steps: int
    sigma: float = 0.0
    target: float | None = None

    def at(self, step: int) -> tuple[float, int]:
        """(sigma, stage) of a step; the closed loop has no stages: 0."""
        if self.config.schedule == "entropy":
            return self.sigma or self.config.sigma_start, 0
        stage = stage_of(step, self.total_steps, self.config.num_stages)
        return stage_sigma(self.config, stage), stage

    def observe(self, step: int, entropy: float) -> None:
        """After a step: move the closed loop by the clean policy's entropy."""
        if self.config.schedule != "entropy" or not math.isfinite(entropy):
            return
        sigma, _ = self.at(step)
        wanted = self._wanted(step, entropy)
        moved = sigma * math.exp(self.config.gain * (wanted - entropy) / max(wanted, 1e-8))
        self.sigma = min(max(moved, self.config.sigma_min), self.config.sigma_max)

    def _wanted(self, step: int, entropy: float) -> float:
        asked = self.config.target_entropy
        if asked is None:
            self.target = entropy if self.target is None else self.target
            return self.target
        if isinstance(asked, tuple):
            t = step / max(1, self.total_steps - 1)
            return asked[0] + (asked[1] - asked[0]) * t
        return asked


def learning_rate(config: Config, update: int, total: int) -> float:
    """Of an update (from 0): linear warm-up, then constant, linear or cosine down to 0 after the last."""
    warmup = config.warmup_steps * total if config.warmup_steps < 1 else config.warmup_steps
    if update < warmup:
        return config.learning_rate * (update + 1) / (warmup + 1)
    t = (update - warmup) / max(1.0, total - warmup)
    factor = {"constant": 1.0, "linear": 1 - t, "cosine": (1 + math.cos(math.pi * t)) / 2}[config.lr_scheduler_type]
    return config.learning_rate * max(0.0, factor)
