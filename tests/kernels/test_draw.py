import pytest
import torch

from qerl.kernels.draw import draw_reference
from qerl.kernels.gpu.draw import draw as fused
from qerl.kernels.sample import stream_key
from tests.kernels.devices import DEVICE, normal


def numbers(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and counts, in the middle of a wider tensor."""
    held = torch.tensor([[stream_key(3, 1, i, 0), i, 0] for i in range(rows)], device=DEVICE)
    return held[:, 0], held[:, 1]


@pytest.mark.parametrize("vocab", [5, 4096, 10_001])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_tokens_and_log_probs_are_the_references(vocab: int, temperature: float) -> None:
    logits = normal(12, vocab) * 3
    tokens, logprobs = fused(logits, *numbers(12), temperature)
    expected, exact = draw_reference(logits, *numbers(12), temperature)
    assert torch.equal(tokens, expected)
    assert torch.allclose(logprobs, exact, atol=2e-5)


def test_what_cannot_be_drawn_never_is() -> None:
    logits = normal(16, 9000)
    logits[:, 1000:8500] = -torch.inf  # a whole chunk, and parts of two
    logits[:, 17] = 12.0
    tokens, _ = fused(logits, *numbers(16), 1.0)
    assert torch.equal(tokens, draw_reference(logits, *numbers(16), 1.0)[0])
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


@pytest.mark.gpu
def test_a_real_vocabulary() -> None:
    logits = normal(256, 151_936) * 2
    tokens, logprobs = fused(logits, *numbers(256), 1.0)
    expected, exact = draw_reference(logits, *numbers(256), 1.0)
    assert (tokens != expected).sum() <= 1  # a tie within rounding: one in some hundred thousand
    assert torch.allclose(logprobs, logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0].float(), atol=1e-5)
    same = tokens == expected
    assert torch.allclose(logprobs[same], exact[same], atol=1e-4)
    alone, _ = fused(logits[7:8], *(x[7:8] for x in numbers(256)), 1.0)
    assert torch.equal(alone, tokens[7:8])
