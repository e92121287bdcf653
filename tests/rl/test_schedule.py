import math

import pytest

from qerl.config import Config, NoiseConfig
from qerl.recipe import build_config
from qerl.rl.schedule import NoiseLevel, layer_sigmas, learning_rate, stage_of, stage_sigma


def noise(**values: object) -> NoiseConfig:
    return build_config({"noise": values}).noise


@pytest.mark.parametrize(
    ("schedule", "formula"),
    [
        ("exponential", lambda t: 1e-2 * (1e-4 / 1e-2) ** t),
        ("linear", lambda t: 1e-2 + (1e-4 - 1e-2) * t),
        ("cosine", lambda t: 1e-4 + (1e-2 - 1e-4) * (1 + math.cos(math.pi * t)) / 2),
        ("logarithmic", lambda t: 1e-2 + (1e-4 - 1e-2) * math.log10(1 + 9 * t)),
        ("constant", lambda t: 1e-2),
    ],
)
@pytest.mark.parametrize("stages", [2, 3, 10])
def test_stages_follow_the_formulas_and_begin_clean(schedule: str, formula, stages: int) -> None:
    config = noise(schedule=schedule, num_stages=stages)
    assert stage_sigma(config, 0) == 0.0
    for stage in range(1, stages):
        assert stage_sigma(config, stage) == pytest.approx(formula((stage - 1) / max(1, stages - 2)))


def test_stages_have_equal_lengths_and_depend_on_the_step_alone() -> None:
    stages = [stage_of(step, 100, 10) for step in range(100)]
    assert stages == sorted(stages)
    assert [stages.count(stage) for stage in range(10)] == [10] * 10
    assert stage_of(100, 100, 10) == 9
    assert [stage_of(step, 5, 2) for step in range(5)] == [0, 0, 0, 1, 1]
    level = NoiseLevel(noise(schedule="off"), 100)
    assert {level.at(step)[0] for step in range(100)} == {0.0}


def test_profiles_over_depth() -> None:
    assert layer_sigmas(noise(), 0.1, 3) == [0.1] * 3
    linear = layer_sigmas(noise(profile="linear"), 0.1, 3)
    assert linear == pytest.approx([0.05, 0.1, 0.15])
    assert layer_sigmas(noise(profile=[1, 0, 2]), 0.1, 3) == pytest.approx([0.1, 0, 0.2])
    with pytest.raises(ValueError, match="needs 4 factors"):
        layer_sigmas(noise(profile=[1, 0, 2]), 0.1, 4)


def test_the_closed_loop_holds_the_entropy() -> None:
    level = NoiseLevel(noise(schedule="entropy", target_entropy=1.0, sigma_start=1e-3, gain=0.5), 100)
    assert level.at(0)[0] == 1e-3
    level.observe(0, 0.5)
    assert level.at(1)[0] == pytest.approx(1e-3 * math.exp(0.25))
    level.observe(1, 2.0)
    assert level.at(2)[0] == pytest.approx(1e-3 * math.exp(0.25 - 0.5))
    for step in range(100):
        level.observe(step, 0.01)
    assert level.at(100)[0] == 0.1  # sigma_max
    entropy = 0.5  # a policy whose entropy follows its noise: the loop finds the sigma that gives the target
    level = NoiseLevel(noise(schedule="entropy", target_entropy=1.0), 100)
    for step in range(200):
        level.observe(step, entropy)
        entropy = 0.5 + 10 * level.at(step)[0]
    assert entropy == pytest.approx(1.0, abs=0.01)


def test_without_a_target_the_first_entropy_is_held_and_a_line_is_followed() -> None:
    level = NoiseLevel(noise(schedule="entropy"), 100)
    level.observe(0, 0.7)
    assert level.target == 0.7
    assert level.at(1)[0] == 1e-2
    level.observe(1, 0.35)
    assert level.at(2)[0] > 1e-2
    line = NoiseLevel(noise(schedule="entropy", target_entropy=[1.0, 0.5]), 101)
    line.observe(50, 0.75)
    assert line.at(51)[0] == pytest.approx(1e-2)


def test_learning_rates() -> None:
    config = Config(learning_rate=1.0, warmup_steps=0.1, lr_scheduler_type="cosine")
    rates = [learning_rate(config, update, 100) for update in range(100)]
    assert rates[:10] == sorted(rates[:10])
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] > 0
    assert learning_rate(Config(learning_rate=1.0, warmup_steps=2, lr_scheduler_type="constant"), 50, 100) == 1.0
    assert learning_rate(Config(learning_rate=1.0, warmup_steps=0, lr_scheduler_type="linear"), 50, 100) == 0.5
