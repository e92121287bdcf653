"""One optimizer step: micro-batches through the clean policy, the loss backward, gradients clipped, weights in
place."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from qerl.config import Config
from qerl.kernels.expand import expand
from qerl.model.decoder import Decoder
from qerl.model.trained import refresh
from qerl.rl.batch import MicroBatch, TrainSample, micro_batches
from qerl.rl.correction import importance_weights
from qerl.rl.loss import LossSettings, coefficients, policy_loss
from qerl.rl.ranks import ALONE, Ranks, balanced, flat_gradients


@dataclass
class Tally:
    """Sums and extremes over the tokens of a step, for the metrics."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    tokens: int = 0
    largest: dict[str, float] = field(default_factory=dict)
    smallest: dict[str, float] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)  # metrics as they are

    def add(self, name: str, values_N: Tensor) -> None:
        self.sums[name] += float(values_N.double().sum())

    def extremes(self, name: str, values_N: Tensor) -> None:
        self.largest[name] = max(self.largest.get(name, -math.inf), float(values_N.max()))
        self.smallest[name] = min(self.smallest.get(name, math.inf), float(values_N.min()))

    def include(self, other: "Tally") -> None:
        """Another rank's tokens as well."""
        self.tokens += other.tokens
        for name, value in other.sums.items():
            self.sums[name] += value
        self.measured = other.measured | self.measured  # of the first rank that has it
        for name, value in other.largest.items():
            self.largest[name] = max(self.largest.get(name, -math.inf), value)
            self.smallest[name] = min(self.smallest.get(name, math.inf), other.smallest[name])

    def mean(self, name: str) -> float:
        return self.sums[name] / max(1, self.tokens)

    @property
    def effective_sample_size(self) -> float:
        """(sum w)^2 / (N sum w^2) of the uncapped token weights: 1 where the sampler is the policy."""
        return self.sums["w"] ** 2 / max(1e-30, self.tokens * self.sums["w^2"])


def require_optimizer(optim: str) -> None:
    """Refuses one whose library is not installed; a run asks before it loads a model."""
    if optim == "adamw_8bit" and find_spec("bitsandbytes") is None:
        raise ValueError("optim=adamw_8bit needs bitsandbytes: pip install bitsandbytes, or use optim=adamw.")


def make_optimizer(config: Config, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    options: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_epsilon,
        "weight_decay": config.weight_decay,
    }
    if config.optim == "adamw":
        return torch.optim.AdamW(parameters, fused=True, **options)
    require_optimizer(config.optim)
    import bitsandbytes

    optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(parameters, **options)
    return optimizer


def loss_settings(config: Config) -> LossSettings:
    return LossSettings(
        config.loss_type,
        config.importance_sampling_level,
        config.epsilon,
        config.epsilon_high,
        config.beta,
        config.max_completion_length,
    )


class Updater:
    """Holds what an update needs besides its samples."""

    def __init__(
        self,
        config: Config,
        model: Decoder,
        optimizer: torch.optim.Optimizer,
        ranks: Ranks = ALONE,
        recompute: int = 0,
    ) -> None:
        self.config, self.model, self.optimizer, self.ranks = config, model, optimizer, ranks
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.settings = loss_settings(config)
        self.recompute = recompute  # blocks
        # A run that starts from an adapter has that as its reference.
        keeps = config.beta > 0 and config.init_adapter is not None
        self.initial = [p.detach().clone() for p in self.parameters] if keeps else None

    def own(self, samples: Sequence[TrainSample]) -> list[int]:
        """Which of an update's samples this rank computes: whole groups, about as many tokens as other ranks."""
        if self.ranks.world == 1:
            return list(range(len(samples)))
        size = self.config.num_generations
        groups = [range(start, min(start + size, len(samples))) for start in range(0, len(samples), size)]
        tokens = [sum(samples[i].length for i in group) for group in groups]
        return [i for g in balanced(tokens, self.ranks.world)[self.ranks.rank] for i in groups[g]]

    def step(self, samples: Sequence[TrainSample], learning_rate: float, tally: Tally) -> dict[str, float]:
        """samples: the update's, of all ranks; each computes its own, and the gradients' sum is everybody's. Returns
        loss and grad_norm; where either is not finite nothing is changed, and `skipped` is 1."""
        lengths = [len(sample.token_ids) if sample.in_loss else 0 for sample in samples]
        coefficient = coefficients(self.settings, lengths)
        self.optimizer.zero_grad(set_to_none=True)
        flat = flat_gradients(self.parameters, more=1) if self.ranks.world > 1 else None
        own, loss = self.own(samples), 0.0
        mine, coefficient = [samples[i] for i in own], [coefficient[i] for i in own]
        for micro in micro_batches(mine, coefficient, self.config.micro_batch_tokens, self.model.device):
            part = self._loss(micro, tally)
            part.backward()  # type: ignore[no-untyped-call]
            loss += float(part.detach())
        if flat is not None:
            flat[-1] = loss
            self.ranks.add_up(flat)  # also what is not finite: all ranks skip the update then
            loss = float(flat[-1])
        trained = [p for p in self.parameters if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
        result = {"loss": loss, "grad_norm": float(norm), "skipped": 0.0}
        if not math.isfinite(loss) or not math.isfinite(result["grad_norm"]):
            self.optimizer.zero_grad(set_to_none=True)
            return result | {"skipped": 1.0}
        if any(lengths):
            nn.utils.clip_grads_with_norm_(trained, self.config.max_grad_norm, norm)
            self._apply(learning_rate)
        return result

    def require_same_weights(self) -> None:
        """Ranks take the same steps, so that their weights stay the same bit for bit; here it is looked at."""
        if self.ranks.world > 1:
            total = torch.stack([p.detach().double().sum() for p in self.parameters]).sum()
            self.ranks.require_same(
                float(total).hex(),
                "their weights. Are the GPUs of one kind? Go on from a checkpoint (--resume).",
            )

    def trial(self, samples: Sequence[TrainSample], tally: Tally) -> None:
        """One micro-batch forward and backward, nothing changed."""
        self.score(samples, old=False, reference=self.config.beta > 0)
        tokens = sum(sample.length for sample in samples)
        (micro,) = micro_batches(samples, [1.0] * len(samples), tokens, self.model.device)
        self._loss(micro, tally).backward()  # type: ignore[no-untyped-call]
        self.optimizer.zero_grad(set_to_none=True)

    def _apply(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        refresh(self.model)

    def _loss(self, micro: MicroBatch, tally: Tally) -> Tensor:
        config = self.config
        logp_N, entropy_N = self.logprobs(micro, self.recompute)
        clean_N = _joined([s.old_logp for s in micro.samples], logp_N.detach())
        if config.ratio == "behaviour":
            old_N, weight_N, touched_N = micro.behaviour_N, None, torch.zeros_like(clean_N, dtype=torch.bool)
        else:
            correction = config.correction
            old_N = clean_N
            weight_N, touched_N = importance_weights(
                old_N, micro.behaviour_N, micro.sequence_N, correction.form, correction.cap
            )
        ref_N = _joined([s.ref_logp for s in micro.samples], None) if self.settings.beta else None
        out = policy_loss(
            self.settings, logp_N, old_N, micro.advantage_N, micro.coefficient_N, micro.sequence_N, weight_N, ref_N
        )
        difference_N = (clean_N - micro.behaviour_N).abs()
        tally.tokens += len(logp_N)
        tally.sums["computed"] += len(micro.packed.ids_T)
        tally.add("entropy", entropy_N)
        tally.add("low", out.low_clipped_N)
        tally.add("high", out.high_clipped_N)
        tally.add("touched", touched_N)
        tally.add("difference", difference_N)
        tally.extremes("difference", difference_N)
        raw_N = (clean_N - micro.behaviour_N).double().exp()
        tally.add("w", raw_N)
        tally.add("w^2", raw_N.square())
        tally.add("ratio", raw_N if weight_N is None else weight_N)
        tally.extremes("ratio", raw_N if weight_N is None else weight_N)
        if out.kl_N is not None:
            tally.add("kl", out.kl_N)
        return out.loss

    def logprobs(self, micro: MicroBatch, recompute: int = 0) -> tuple[Tensor, Tensor]:
        """log p and entropy of the completion tokens under the policy of the loss."""
        hidden_TD = self.model(micro.packed, noise=self.config.noise.in_loss, recompute=recompute)
        return self.model.logprobs(expand(hidden_TD, micro.places), micro.targets_N, self.config.temperature)

    @torch.no_grad()
    def score(self, samples: Sequence[TrainSample], old: bool, reference: bool) -> None:
        """Before the first update: the clean policy's log-probs, and the reference's."""
        weights = [1.0] * len(samples)
        for micro in micro_batches(samples, weights, self.config.micro_batch_tokens, self.model.device):
            lengths = [len(sample.token_ids) for sample in micro.samples]
            if old:
                parts = torch.split(self.logprobs(micro)[0], lengths)
                for sample, part in zip(micro.samples, parts, strict=True):
                    sample.old_logp = part
            if reference:
                with self._reference():
                    hidden_ND = expand(self.model(micro.packed), micro.places)
                    logp_N, _ = self.model.logprobs(hidden_ND, micro.targets_N, self.config.temperature)
                for sample, part in zip(micro.samples, torch.split(logp_N, lengths), strict=True):
                    sample.ref_logp = part

    @torch.no_grad()
    def cache_difference(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """How far the sampler's log-probs are from the same policy's, noise included, without an FP8 cache between: of
        the first micro-batch, before the first update."""
        weights, budget = [1.0] * len(samples), self.config.micro_batch_tokens
        for micro in micro_batches(samples, weights, budget, self.model.device):
            hidden_TD = self.model(micro.packed, noise=self.config.noise.schedule != "off")
            logp_N, _ = self.model.logprobs(expand(hidden_TD, micro.places), micro.targets_N, self.config.temperature)
            difference_N = (logp_N - micro.behaviour_N).abs()
            name = "sampling/fp8_cache_logp_difference"
            return {f"{name}/mean": float(difference_N.mean()), f"{name}/max": float(difference_N.max())}
        return {}

    @contextmanager
    def _reference(self) -> Iterator[None]:
        """Inside, the model is the reference policy: without adapter, or with the one that the run started from."""
        if self.initial is None:
            with self.model.adapter_disabled():
                yield
            return
        now = [p.detach().clone() for p in self.parameters]
        try:
            self._write(self.initial)
            yield
        finally:
            self._write(now)

    @torch.no_grad()
    def _write(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)
        refresh(self.model)


def _joined(parts: Sequence[Tensor | None], default: Tensor | None) -> Tensor:
    """The samples' tensors one after another, or the default where they have none."""
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        assert not found, "some samples have been scored and others not"
        assert default is not None, "log-probs that nothing scored"
        return default
    return torch.cat(found)
