"""The policy loss, judged by TRL and by closed forms."""

import math
from pathlib import Path

import pytest
import torch
import transformers

from qerl.rl.advantage import advantages, total_rewards
from qerl.rl.loss import LossSettings, coefficients, policy_loss
from tests.rl import trl_oracle

LENGTHS = [5, 1, 8, 3, 8, 2, 7, 4]


@pytest.fixture
def tokenizer(tmp_path: Path, add_tokenizer) -> transformers.PreTrainedTokenizerFast:
    add_tokenizer(tmp_path)
    return transformers.AutoTokenizer.from_pretrained(tmp_path)


def packed(values_BT: torch.Tensor) -> torch.Tensor:
    return torch.cat([row[:length] for row, length in zip(values_BT, LENGTHS, strict=True)])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["grpo", "dapo", "dr_grpo", "bnpo", "cispo"])
def test_loss_and_gradient_equal_trls(tmp_path: Path, tokenizer, kind: str, level: str) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(8, 8, generator=generator, dtype=torch.float64) * scale

    logp, advantage = normal(1) - 2, normal(1)[:, 0]
    old, ref, weight = logp + normal(0.5) + normal(0.5)[:, :1], logp + normal(0.5), normal(1).exp()
    mask = torch.tensor([[t < length for t in range(8)] for length in LENGTHS])
    high = {"epsilon_high": 0.9} if kind == "cispo" else {"epsilon_high": 0.28}
    for beta, weighted in ((0.0, False), (0.1, False), (0.0, True), (0.04, True)):
        judge = trl_oracle.trainer(
            tmp_path, tokenizer, loss_type=kind, importance_sampling_level=level, epsilon=0.2, **high
        )
        judge.beta = beta  # set before, it would want a second model
        expected, gradient = trl_oracle.loss_and_gradient(
            judge, logp, old, mask, advantage, ref if beta else None, weight if weighted else None
        )
        settings = LossSettings(kind, level, 0.2, high["epsilon_high"], beta, max_completion_length=8)
        coefficient = coefficients(settings, LENGTHS)
        leaf = packed(logp).requires_grad_()
        out = policy_loss(
            settings,
            leaf,
            packed(old),
            packed(advantage[:, None].expand(8, 8)),
            packed(torch.tensor(coefficient, dtype=torch.float64)[:, None].expand(8, 8)),
            packed(torch.arange(8)[:, None].expand(8, 8)),
            packed(weight) if weighted else None,
            packed(ref) if beta else None,
        )
        out.loss.backward()
        assert torch.allclose(out.loss.detach(), expected, rtol=1e-12)
        assert torch.allclose(leaf.grad, packed(gradient), rtol=1e-10, atol=1e-14)
        touched = out.high_clipped_N.sum() + out.low_clipped_N.sum()
        assert 0 < touched < len(leaf)  # clipping is at work


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_equal_trls(tmp_path: Path, tokenizer, scale: str) -> None:
    generator = torch.Generator().manual_seed(1)
    first, second = torch.randn(2, 8, generator=generator, dtype=torch.float32).tolist()
    second[3] = None
    second[6] = None
    first[6] = None  # nothing applies
    given = {"first": first, "second": second}

    def reward(name: str):
        def function(completions, **kwargs):
            return given[name]

        function.__name__ = name
        return function

    judge = trl_oracle.trainer(
        tmp_path, tokenizer, [reward("first"), reward("second")], scale_rewards=scale, reward_weights=[1.0, 0.5]
    )
    inputs = [{"prompt": "abc"}] * 4 + [{"prompt": "hello"}] * 4
    expected = judge._generate_and_score_completions(inputs)["advantages"]
    rewards = torch.tensor([[math.nan if v is None else v for v in values] for values in (first, second)]).t()
    total = total_rewards(rewards, torch.tensor([1.0, 0.5]))
    ours = advantages(total.view(2, 4), scale).flatten()
    assert ours[6] == 0
    assert torch.allclose(ours, expected.to(ours.dtype), atol=1e-5)


def test_clipping_in_closed_form() -> None:
    settings = LossSettings("dapo", epsilon=0.2, epsilon_high=0.28)
    ratio = torch.tensor([0.5, 0.9, 1.5, 0.5, 0.9, 1.5], dtype=torch.float64)
    advantage = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    logp = ratio.log().requires_grad_()
    one = torch.ones(6, dtype=torch.float64)
    out = policy_loss(settings, logp, torch.zeros(6, dtype=torch.float64), advantage, one, torch.arange(6))
    out.loss.backward()
    # A > 0: capped above at 1.28; A < 0: capped below at 0.8. What is capped has no gradient.
    assert float(out.loss.detach()) == pytest.approx(-(0.5 + 0.9 + 1.28) + (0.8 + 0.9 + 1.5))
    assert torch.allclose(logp.grad, torch.tensor([-0.5, -0.9, 0.0, 0.0, 0.9, 1.5], dtype=torch.float64))
    assert out.high_clipped_N.tolist() == [False, False, True, False, False, False]
    assert out.low_clipped_N.tolist() == [False, False, False, True, False, False]


def test_normalisers_in_closed_form() -> None:
    lengths = [4, 0, 2]  # the middle one is masked: it counts as a sequence and has no tokens
    assert coefficients(LossSettings("grpo"), lengths) == [1 / 12, 0, 1 / 6]
    for kind in ("dapo", "bnpo", "cispo"):
        assert coefficients(LossSettings(kind), lengths) == [1 / 6, 0, 1 / 6]
    assert coefficients(LossSettings("dr_grpo", max_completion_length=10), lengths) == [1 / 30, 0, 1 / 30]
    with pytest.raises(ValueError, match="no loss 'ppo'"):
        coefficients(LossSettings("ppo"), lengths)


def test_a_gspo_ratio_is_the_geometric_mean_of_its_tokens() -> None:
    logp = torch.tensor([0.1, 0.3, -0.4], dtype=torch.float64)
    zero, one = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    settings = LossSettings("dapo", "sequence", epsilon=10.0)
    out = policy_loss(settings, logp, zero, one, one, torch.tensor([0, 0, 1]))
    assert float(out.loss) == pytest.approx(-(2 * math.exp(0.2) + math.exp(-0.4)))


def test_cispos_cap_is_five_unless_said() -> None:
    assert LossSettings("cispo").high == 5.0
    assert LossSettings("cispo", epsilon_high=3.0).high == 3.0
    assert LossSettings("dapo", epsilon=0.3).high == 0.3
