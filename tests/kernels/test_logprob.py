import pytest
import torch

from qerl.kernels.gpu.logprob import softmax
from qerl.kernels.logprob import chunk_tokens, logprob, logprob_reference, softmax_reference
from tests.kernels.devices import DEVICE, normal
from tests.memory import peak_bytes


def inputs(tokens: int, width: int, vocabulary: int, dtype: torch.dtype = torch.float32, device: str = "cpu"):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).to(device, dtype).requires_grad_()
    head = (torch.randn(vocabulary, width, generator=generator) * 0.3).to(device, dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator).to(device)
    return hidden, head, targets


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
def test_equals_the_whole_logits_values_and_gradients(chunk: int, temperature: float) -> None:
    hidden, head, targets = inputs(17, 24, 53)
    weights = torch.linspace(-1, 2, 17)
    results = []
    for function in (
        lambda: logprob(hidden, head, targets, temperature, chunk),
        lambda: logprob_reference(hidden, head, targets, temperature),
    ):
        logp, entropy = function()
        results.append((logp, entropy.detach(), *torch.autograd.grad((logp * weights).sum(), (hidden, head))))
    for ours, reference in zip(*results, strict=True):
        assert torch.allclose(ours, reference, atol=2e-5, rtol=1e-5)


def test_entropy_of_even_and_certain_distributions() -> None:
    hidden = torch.tensor([[0.0, 0.0], [1000.0, 0.0]])
    head = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [-1.0, 0.0]])
    logp, entropy = logprob(hidden, head, torch.tensor([2, 0]))
    assert torch.allclose(entropy, torch.tensor([4.0, 1.0]).log(), atol=1e-6)
    assert torch.allclose(logp, torch.tensor([-torch.tensor(4.0).log(), 0.0]), atol=1e-6)


def test_bf16_errs_at_most_twice_as_much_as_bf16_pytorch() -> None:
    hidden, head, targets = inputs(64, 128, 1000, torch.bfloat16)
    exact, _ = logprob_reference(hidden.float(), head.float(), targets)
    ours, _ = logprob(hidden, head, targets, chunk=10)
    plain = torch.log_softmax((hidden @ head.t()).float(), -1).gather(1, targets[:, None])[:, 0]
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().max() <= 2 * (plain - exact).abs().max()
    # float32 logits: no bf16 steps in the result
    assert (ours - exact).abs().max() < 1e-4


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_frozen_head_gets_no_gradient_and_the_hidden_states_the_same(chunk: int, temperature: float) -> None:
    hidden, head, targets = inputs(9, 8, 11)
    weights = torch.linspace(-1, 2, 9)
    logp, _ = logprob(hidden, head.detach(), targets, temperature, chunk)
    (logp * weights).sum().backward()
    exact, _ = logprob_reference(hidden, head, targets, temperature)
    (wanted,) = torch.autograd.grad((exact * weights).sum(), hidden)
    assert hidden.grad is not None
    assert torch.allclose(hidden.grad, wanted, atol=2e-6, rtol=1e-5)
    assert head.grad is None


def test_bf16_gradients_err_at_most_twice_as_much_as_bf16_pytorch() -> None:
    hidden, head, targets = inputs(64, 128, 1000, torch.bfloat16)
    frozen = head.detach()
    ours, _ = logprob(hidden, frozen, targets, chunk=10)
    plain = torch.log_softmax(hidden @ frozen.t(), -1).gather(1, targets[:, None])[:, 0]
    exact, _ = logprob_reference(wide := hidden.detach().float().requires_grad_(), frozen.float(), targets)
    gradients = [
        torch.autograd.grad(y.sum(), x)[0].float() for y, x in ((ours, hidden), (plain, hidden), (exact, wide))
    ]
    assert (gradients[0] - gradients[2]).norm() <= 2 * (gradients[1] - gradients[2]).norm()


def test_no_tensor_of_all_logits_ever_exists() -> None:
    tokens, width, vocabulary, chunk = 512, 32, 2048, 16
    hidden, head, targets = inputs(tokens, width, vocabulary)
    whole = tokens * vocabulary * 4

    def both_passes() -> None:
        logp, entropy = logprob(hidden, head, targets, chunk=chunk)
        torch.autograd.grad((logp * entropy.detach()).sum(), (hidden, head))

    def reference() -> None:
        logp, _ = logprob_reference(hidden, head, targets)
        torch.autograd.grad(logp.sum(), (hidden, head))

    # Three chunks of logits at a time at most, besides the gradients themselves.
    allowed = 3 * chunk * vocabulary * 4 + 3 * head.nbytes + 4 * hidden.nbytes + 64 * tokens
    assert peak_bytes(both_passes) < allowed < whole / 2
    assert peak_bytes(reference) > 2 * whole  # the counter sees what there is to see


@pytest.mark.parametrize("width", [1, 53, 9000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None])
def test_the_kernel_equals_the_reference(width: int, temperature: float, dtype: torch.dtype | None) -> None:
    logits = normal(5, width) * 8 + 30
    targets = torch.randint(0, width, (5,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    outcomes = []
    for function in (softmax, softmax_reference):
        into = tuple(torch.zeros(5, device=DEVICE) for _ in range(3))
        change = function(logits.clone(), targets, temperature, into, dtype)
        outcomes.append((*into, change.float() if dtype is not None else into[0]))
    for ours, exact in zip(*outcomes, strict=True):
        # The interpreter rounds to bf16 by cutting.
        loose = dtype == torch.bfloat16 and DEVICE == "cpu" and ours.dim() == 2
        assert torch.allclose(ours, exact, rtol=2**-7 if loose else 2e-5, atol=2e-5)


def test_logits_of_one_sort_and_infinities_make_no_nan() -> None:
    logits = torch.full((2, 40), -torch.inf, device=DEVICE)
    logits[:, 3] = 5.0
    targets, into = torch.tensor([3, 3], device=DEVICE), tuple(torch.zeros(2, device=DEVICE) for _ in range(3))
    change = softmax(logits, targets, 1.0, into, torch.float32)
    assert torch.equal(into[0], torch.zeros_like(into[0]))
    assert torch.equal(change, torch.zeros_like(change))


def test_chunks_are_whole_tiles_where_the_vocabulary_is_large() -> None:
    assert chunk_tokens(152064) == 1024
    assert chunk_tokens(10**9) == 1


def test_temperature_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature above 0"):
        logprob(*inputs(2, 4, 5), temperature=0.0)


@pytest.mark.gpu
def test_on_the_gpu_it_equals_the_cpu_and_stays_small() -> None:
    tokens, width, vocabulary = 4096, 896, 151936
    hidden, head, targets = inputs(tokens, width, vocabulary, torch.bfloat16, "cuda")
    exact, exact_entropy = logprob_reference(hidden[:64].float().cpu(), head.float().cpu(), targets[:64].cpu())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logp, entropy = logprob(hidden, head.detach(), targets)
    logp.sum().backward()
    extra = torch.cuda.max_memory_allocated() - before
    assert (logp[:64].cpu() - exact).abs().max() < 1e-3
    assert (entropy[:64].cpu() - exact_entropy).abs().max() < 1e-3
    assert extra < 1e9 < tokens * vocabulary * 4 / 2
