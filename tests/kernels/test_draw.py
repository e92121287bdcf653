import pytest
import torch

from qerl.kernels.draw import draw_reference
from qerl.kernels.gpu.draw import draw as filtering
from qerl.kernels.sample import stream_key
from tests.kernels.devices import DEVICE, normal


def numbers(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and counts, in the middle of a wider tensor."""
    held = torch.tensor([[stream_key(3, 1, i, 0), i, 0] for i in range(rows)], device=DEVICE)
    return held[:, 0], held[:, 1]


PLAIN = (0, 1.0, 0.0, None)
FILTERS = {
    "top_k": (40, 1.0, 0.0),
    "one": (1, 1.0, 0.0),
    "top_p": (0, 0.95, 0.0),
    "little top_p": (0, 1e-9, 0.0),
    "nearly all": (0, 1 - 1e-6, 0.0),
    "min_p": (0, 1.0, 0.02),
    "all": (300, 0.9, 0.001),
    "more than there are": (1 << 20, 1.0, 0.0),
}


def fused(logits: torch.Tensor, keys: torch.Tensor, drawn: torch.Tensor, temperature: float):
    """Without filters."""
    tokens, logprobs, policy = filtering(logits, keys, drawn, temperature, *PLAIN)
    assert policy is logprobs
    return tokens, logprobs


@pytest.mark.parametrize("vocab", [5, 10_001])
@pytest.mark.parametrize("name", FILTERS)
def test_filters_leave_what_the_references_do(name: str, vocab: int) -> None:
    logits = normal(6, vocab) * 3
    logits[1] *= -1e-3  # near zero, of both signs
    logits[2, 2:] = -torch.inf
    logits[3] = logits[3].round()  # many equals
    got = filtering(logits, *numbers(6), 0.8, *FILTERS[name], None)
    expected = draw_reference(logits, *numbers(6), 0.8, *FILTERS[name], None)
    assert torch.equal(got[0], expected[0])
    for ours, exact in zip(got[1:], expected[1:], strict=True):
        assert torch.allclose(ours, exact, atol=2e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", [None, "all"])
def test_log_probs_of_the_policy_are_of_its_own_logits(name: str | None, temperature: float) -> None:
    policy = normal(8, 5000) * 3
    changed = policy - 2.0 * (normal(8, 5000, seed=1) > 0)
    rules = FILTERS[name] if name else PLAIN[:3]
    got = filtering(changed, *numbers(8), temperature, *rules, policy)
    expected = draw_reference(changed, *numbers(8), temperature, *rules, policy)
    assert torch.equal(got[0], expected[0])
    for ours, exact in zip(got[1:], expected[1:], strict=True):
        assert torch.allclose(ours, exact, atol=2e-5)


def test_filtered_draws_of_a_row_do_not_depend_on_the_others() -> None:
    logits, (keys, drawn) = normal(3, 9000) * 2, numbers(3)
    together = filtering(logits, keys, drawn, 1.0, 100, 0.9, 0.0, None)
    for row in range(3):
        alone = filtering(*(x[row : row + 1] for x in (logits, keys, drawn)), 1.0, 100, 0.9, 0.0, None)
        assert all(torch.equal(a, b[row : row + 1]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("vocab", [5, 4096, 10_001])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_tokens_and_log_probs_are_the_references(vocab: int, temperature: float) -> None:
    logits = normal(12, vocab) * 3
    tokens, logprobs = fused(logits, *numbers(12), temperature)
    expected, exact = draw_reference(logits, *numbers(12), temperature, *PLAIN)[:2]
    assert torch.equal(tokens, expected)
    assert torch.allclose(logprobs, exact, atol=2e-5)


def test_what_cannot_be_drawn_never_is() -> None:
    logits = normal(16, 9000)
    logits[:, 1000:8500] = -torch.inf  # a whole chunk, and parts of two
    logits[:, 17] = 12.0
    tokens, _ = fused(logits, *numbers(16), 1.0)
    assert torch.equal(tokens, draw_reference(logits, *numbers(16), 1.0, *PLAIN)[0])
    logits[:, 8500:] = -torch.inf
    assert fused(logits, *numbers(16), 1.0)[0].max() < 1000


def test_the_first_of_equals_is_the_largest() -> None:
    logits = torch.zeros(2, 9000, device=DEVICE)
    logits[0, [70, 5000, 8999]] = 1.0
    tokens, logprobs = fused(logits, *numbers(2), 0.0)
    assert tokens.tolist() == [70, 0]
    assert torch.allclose(logprobs, logits.log_softmax(-1).amax(-1), atol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_comes_out_as_nan_and_harms_no_other_row(temperature: float) -> None:
    logits = normal(4, 5000)
    judge, _ = fused(logits, *numbers(4), temperature)
    logits[1, 4999], logits[2] = torch.nan, torch.nan
    tokens, logprobs = fused(logits, *numbers(4), temperature)
    assert logprobs.isnan().tolist() == [False, True, True, False]
    assert tokens[[0, 3]].tolist() == judge[[0, 3]].tolist()
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 5000
    for rules in ((50, 0.9, 0.01), (0, 0.9, 0.0)) if temperature else ():
        tokens, *both = filtering(logits, *numbers(4), temperature, *rules, None)
        assert all(logprobs.isnan().tolist() == [False, True, True, False] for logprobs in both)
        assert 0 <= int(tokens.min()) <= int(tokens.max()) < 5000


@pytest.mark.parametrize("rules", [PLAIN[:3], FILTERS["all"]])
def test_log_probs_of_large_logits_are_not_rounded(rules: tuple[int, float, float]) -> None:
    logits = torch.full((2, 5000), -30.0, device=DEVICE)
    logits[:, [7, 4500]] = 30.0
    for found in filtering(logits, *numbers(2), 0.001, *rules, None)[1:]:
        assert torch.allclose(found, torch.tensor(0.5, device=DEVICE).log(), atol=1e-6)


@pytest.mark.gpu
def test_a_real_vocabulary() -> None:
    logits = normal(256, 151_936) * 2
    tokens, logprobs = fused(logits, *numbers(256), 1.0)
    expected, exact = draw_reference(logits, *numbers(256), 1.0, *PLAIN)[:2]
    assert (tokens != expected).sum() <= 1  # a tie within rounding: one in some hundred thousand
    assert torch.allclose(logprobs, logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0].float(), atol=1e-5)
    same = tokens == expected
    assert torch.allclose(logprobs[same], exact[same], atol=1e-4)
    alone, _ = fused(logits[7:8], *(x[7:8] for x in numbers(256)), 1.0)
    assert torch.equal(alone, tokens[7:8])


@pytest.mark.gpu
@pytest.mark.parametrize("name", FILTERS)
def test_filters_of_a_real_vocabulary(name: str) -> None:
    logits = (normal(256, 151_936) * 2).bfloat16().float()  # as a model's: many equals
    got = filtering(logits, *numbers(256), 0.6, *FILTERS[name], None)
    expected = draw_reference(logits, *numbers(256), 0.6, *FILTERS[name], None)
    same = got[0] == expected[0]
    assert (~same).sum() <= 1
    for ours, exact in zip(got[1:], expected[1:], strict=True):
        assert torch.allclose(ours[same], exact[same], atol=1e-4)
