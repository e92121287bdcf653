"""One optimizer step on a real model: packing and micro-batches change nothing, NaN changes nothing."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qerl.model.adapter import LoraSettings, add_lora, trained_parameters
from qerl.model.decoder import Decoder
from qerl.model.loader import load
from qerl.recipe import build_config
from qerl.rl.batch import TrainSample, micro_batches
from qerl.rl.update import Tally, Updater, make_optimizer
from tests.model.test_adapter import shake


@pytest.fixture
def model(make_checkpoint: Callable[..., Path]) -> Decoder:
    made = load(str(make_checkpoint("qwen2", torch.float32)), base="bf16", device="cpu")
    add_lora(made, LoraSettings(r=4))
    shake(made)
    return made


def samples(count: int = 9) -> list[TrainSample]:
    draw = random.Random(0)
    made = []
    for i in range(count):
        ids = [tuple(draw.randrange(256) for _ in range(draw.randrange(1, 12))) for _ in range(2)]
        behaviour = tuple(-6.1 + draw.random() for _ in ids[1])
        made.append(TrainSample(*ids, behaviour, draw.gauss(0, 1), in_loss=i != 4))
    return made


def gradients(model: Decoder, work: list[TrainSample], **values: object) -> tuple[dict[str, torch.Tensor], float]:
    config = build_config({"max_grad_norm": 1e9, "lora_r": 4} | values)
    parameters = trained_parameters(model)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    updater = Updater(config, model, torch.optim.SGD(parameters.values(), lr=1.0))
    updater.score(work, old=True, reference=config.beta > 0)
    for sample in work:  # as after an earlier update, so that ratios are not 1
        assert sample.old_logp is not None
        sample.old_logp = sample.old_logp + 0.3 * torch.sin(torch.arange(len(sample.old_logp)))
    result = updater.step(work, 1.0, Tally())
    moved = {name: before[name] - p.detach() for name, p in parameters.items()}
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(before[name])
    return moved, result["loss"]


@pytest.mark.parametrize("kind", ["grpo", "dapo", "dr_grpo", "bnpo", "cispo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_micro_batches_do_not_change_the_gradient(model: Decoder, kind: str, level: str) -> None:
    options = {"loss_type": kind, "importance_sampling_level": level, "beta": 0.1}
    whole, loss = gradients(model, samples(), micro_batch_tokens=10_000, **options)
    assert any(float(g.abs().max()) > 0 for g in whole.values())
    for tokens in (1, 25, 60):
        parts, again = gradients(model, samples(), micro_batch_tokens=tokens, **options)
        assert again == pytest.approx(loss, rel=1e-5)
        for name, gradient in whole.items():
            assert torch.allclose(parts[name], gradient, rtol=1e-3, atol=1e-6 + 1e-5 * float(gradient.abs().max()))


def test_micro_batches_keep_order_and_budget() -> None:
    work = samples()
    made = list(micro_batches(work, [float(s.in_loss) for s in work], 30, torch.device("cpu")))
    assert [s for micro in made for s in micro.samples] == [s for s in work if s.in_loss]
    assert all(len(m.packed.ids_T) <= 30 or len(m.samples) == 1 for m in made)
    for micro in made:
        assert micro.targets_N.tolist() == [t for s in micro.samples for t in s.token_ids]


def test_the_ratio_of_a_single_update_is_one_and_the_sampler_enters_as_a_weight(model: Decoder) -> None:
    """With one update old = logp: the gradient is that of -w A logp, w = min(exp(logp - behaviour), cap)."""
    work = [s for s in samples() if s.in_loss]
    config = build_config({"correction": {"cap": 1.2}, "max_grad_norm": 1e9})
    parameters = trained_parameters(model)
    updater = Updater(config, model, torch.optim.SGD(parameters.values(), lr=0.0))
    tokens = sum(len(s.token_ids) for s in work)
    (micro,) = micro_batches(work, [1.0 / tokens] * len(work), 10_000, torch.device("cpu"))
    logp, _ = updater.logprobs(micro)
    w = (logp.detach() - micro.behaviour_N).exp().clamp(max=1.2)
    expected = torch.autograd.grad(-(w * micro.advantage_N * logp).sum() / tokens, list(parameters.values()))
    tally = Tally()
    updater._loss(micro, tally).backward()
    for parameter, gradient in zip(parameters.values(), expected, strict=True):
        assert torch.allclose(parameter.grad, gradient, atol=1e-6)
    assert 0 < tally.mean("touched") < 1
    assert tally.sums["low"] == tally.sums["high"] == 0
    assert 0 < tally.effective_sample_size < 1


def test_ratio_behaviour_takes_the_sampler_as_the_old_policy(model: Decoder) -> None:
    work = [s for s in samples() if s.in_loss]
    config = build_config({"ratio": "behaviour", "max_grad_norm": 1e9})
    parameters = trained_parameters(model)
    updater = Updater(config, model, torch.optim.SGD(parameters.values(), lr=0.0))
    (micro,) = micro_batches(work, [1.0] * len(work), 10_000, torch.device("cpu"))
    logp, _ = updater.logprobs(micro)
    ratio = (logp - micro.behaviour_N).exp()
    loss = -torch.min(ratio * micro.advantage_N, ratio.clamp(0.8, 1.2) * micro.advantage_N).sum()
    assert float(updater._loss(micro, Tally())) == pytest.approx(float(loss), rel=1e-5)


def test_a_gradient_that_is_not_finite_changes_nothing(model: Decoder) -> None:
    config = build_config({})
    parameters = trained_parameters(model)
    updater = Updater(config, model, make_optimizer(config, list(parameters.values())))
    before = {name: p.detach().clone() for name, p in parameters.items()}
    work = samples()
    work[0].advantage = float("nan")
    assert updater.step(work, 1e-3, Tally())["skipped"] == 1
    assert all(torch.equal(p, before[name]) for name, p in parameters.items())
    assert updater.step(samples(), 1e-3, Tally())["skipped"] == 0
    assert not all(torch.equal(p, before[name]) for name, p in parameters.items())


def test_gradients_are_clipped_and_eight_bit_adamw_steps(model: Decoder) -> None:
    parameters = trained_parameters(model)
    updater = Updater(build_config({"max_grad_norm": 1e-3}), model, torch.optim.SGD(parameters.values(), lr=1.0))
    before = torch.cat([p.detach().flatten() for p in parameters.values()])
    norm = updater.step(samples(), 1.0, Tally())["grad_norm"]
    moved = torch.cat([p.detach().flatten() for p in parameters.values()]) - before
    assert norm > 1e-3
    assert float(moved.norm()) == pytest.approx(1e-3, rel=1e-2)
    config = build_config({"optim": "adamw_8bit"})
    eight = Updater(config, model, make_optimizer(config, list(parameters.values())))
    assert eight.step(samples(), 1e-3, Tally())["skipped"] == 0
