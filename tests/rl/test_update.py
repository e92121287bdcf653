"""One optimizer step on a real model: packing and micro-batches change nothing, NaN changes nothing."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl.model.adapter import LoraSettings, add_lora, trained_parameters
from qerl.model.decoder import Decoder
from qerl.model.loader import load
from qerl.recipe import build_config
from qerl.rl.batch import MicroBatch, TrainSample, micro_batches
from qerl.rl.update import Tally, Updater, make_optimizer
from tests.model.test_adapter import shake


@pytest.fixture
def model(make_checkpoint: Callable[..., Path]) -> Decoder:
    made = load(str(make_checkpoint("qwen2", torch.float32)), base="bf16", device="cpu")
    add_lora(made, LoraSettings(r=4))
    shake(made)
    return made


def samples(count: int = 9) -> list[TrainSample]:
    """Two prompts with three completions each, and others with one."""
    draw = random.Random(0)
    made: list[TrainSample] = []
    for i in range(count):
        ids = [tuple(draw.randrange(256) for _ in range(draw.randrange(1, 12))) for _ in range(2)]
        prompt = made[-1].prompt_ids if i in (1, 2, 4, 5) else ids[0]
        behaviour = tuple(-6.1 + draw.random() for _ in ids[1])
        made.append(TrainSample(prompt, ids[1], behaviour, draw.gauss(0, 1), in_loss=i != 4))
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


def sample(prompt: int, length: int, completion: int) -> TrainSample:
    """Prompts are told apart by their number."""
    return TrainSample((prompt,) * length, (0,) * completion, (0.0,) * completion, 1.0, True)


def packs(work: list[TrainSample], budget: int, weights: list[float] | None = None) -> list[MicroBatch]:
    return list(micro_batches(work, weights or [1.0] * len(work), budget, torch.device("cpu")))


def test_a_prompt_counts_once_and_a_group_is_cut_only_where_it_must() -> None:
    groups = [[sample(i, 10, n) for n in counts] for i, counts in enumerate([(5, 5, 5), (20, 20), (1, 1), (30,) * 5])]
    made = packs([one for group in groups for one in group], 50)
    # 25 tokens, and 12 that fit beside them; 50; then 10 + 30 each.
    assert [[s.prompt_ids[0] for s in micro.samples] for micro in made] == [[0, 0, 0, 2, 2], [1, 1], *[[3]] * 5]
    assert [len(micro.packed.ids_T) for micro in made] == [37, 50, *[40] * 5]
    assert [len(micro.packed.ids_T) for micro in packs(groups[3], 100)] == [100, 70]
    assert [len(micro.packed.ids_T) for micro in packs(groups[3], 1000)] == [160]
    # Masked completions are not computed; a prompt drawn twice is still one.
    (micro,) = packs(groups[0] + groups[1] + groups[0], 1000, [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0])
    assert len(micro.packed.ids_T) == 10 + 4 * 5
    assert micro.coefficient_N.tolist() == [1.0] * 20


GROUPS = st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 12), min_size=1, max_size=6)), max_size=8)


@given(shapes=GROUPS, budget=st.integers(1, 60), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_every_sequence_is_in_one_micro_batch_and_budgets_hold(
    shapes: list[tuple[int, list[int]]], budget: int, seed: int
) -> None:
    work = [sample(i, prompt, n) for i, (prompt, counts) in enumerate(shapes) for n in counts]
    random.Random(seed).shuffle(work)
    weights = [float(i % 3 > 0) for i in range(len(work))]
    made = packs(work, budget, weights)
    kept = [one for one, weight in zip(work, weights, strict=True) if weight]
    assert sorted(id(s) for micro in made for s in micro.samples) == sorted(map(id, kept))
    for micro in made:
        prompts = {s.prompt_ids for s in micro.samples}
        tokens = sum(map(len, prompts)) + sum(len(s.token_ids) for s in micro.samples)
        assert len(micro.packed.ids_T) == tokens
        assert tokens <= budget or len(micro.samples) == 1
        assert micro.targets_N.tolist() == [t for s in micro.samples for t in s.token_ids]
    for i, (prompt, _) in enumerate(shapes):
        mine = [s for s in kept if s.prompt_ids[0] == i]
        if prompt + sum(len(s.token_ids) for s in mine) <= budget:
            assert sum(any(s.prompt_ids[0] == i for s in micro.samples) for micro in made) <= 1


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
