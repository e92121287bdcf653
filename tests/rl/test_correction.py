import math

import pytest
import torch

from qerl.rl.correction import importance_weights

OLD = torch.tensor([0.0, 1.0, -1.0, 0.5])
BEHAVIOUR = torch.tensor([0.0, 0.0, 0.0, 0.0])
SEQUENCE = torch.tensor([0, 0, 1, 1])


@pytest.mark.parametrize(
    ("form", "expected", "touched"),
    [
        ("token", [1.0, 2.0, math.exp(-1), math.exp(0.5)], [0, 1, 0, 0]),
        ("masked", [1.0, 0.0, math.exp(-1), math.exp(0.5)], [0, 1, 0, 0]),
        ("sequence", [2.0, 2.0, math.exp(-0.5), math.exp(-0.5)], [1, 1, 0, 0]),
        ("geometric", [math.exp(0.5), math.exp(0.5), math.exp(-0.25), math.exp(-0.25)], [0, 0, 0, 0]),
        ("off", [1.0] * 4, [0] * 4),
    ],
)
def test_weights_in_closed_form(form: str, expected: list[float], touched: list[int]) -> None:
    weights, capped = importance_weights(OLD, BEHAVIOUR, SEQUENCE, form, cap=2.0)
    assert torch.allclose(weights, torch.tensor(expected))
    assert capped.int().tolist() == touched


def test_weights_have_no_gradient_and_unknown_forms_are_refused() -> None:
    old = OLD.clone().requires_grad_()
    weights, _ = importance_weights(old, BEHAVIOUR, SEQUENCE, "token", 2.0)
    assert not weights.requires_grad
    with pytest.raises(ValueError, match="no correction 'vtrace'"):
        importance_weights(OLD, BEHAVIOUR, SEQUENCE, "vtrace", 2.0)
