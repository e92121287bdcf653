import pytest
import torch

from qerl.kernels.sample import MASK, filtered, penalize, sample, stream_key, uniforms

N = 40_000
FILTERS = {
    "none": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "all": {"top_k": 8, "top_p": 0.8, "min_p": 0.05},
}


def expected(logits: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0):
    """Exact probabilities by the definition of each filter, token by token."""
    p = (logits.double() / temperature).softmax(-1)
    order = p.argsort(descending=True).tolist()
    if top_k:
        order = order[:top_k]
    q = p[order] / p[order].sum()
    kept, mass = [], 0.0
    for token, share in zip(order, q.tolist(), strict=True):
        if mass >= top_p:
            break
        kept.append(token)
        mass += share
    kept = [t for t in kept if p[t] >= min_p * p[kept[0]]]
    out = torch.zeros_like(p)
    out[kept] = p[kept]
    return out / out.sum()


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_draws_follow_the_exact_distribution(name: str, temperature: float) -> None:
    options = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | FILTERS[name]
    logits = torch.randn(12, generator=torch.Generator().manual_seed(4)) * 1.5
    p = expected(logits, temperature, **options)
    keys = torch.tensor([stream_key(1, 2, i, 0) for i in range(N)])
    numbers = uniforms(keys, torch.full_like(keys, 3))
    tokens, drawn, policy = sample(logits.expand(N, -1), numbers, temperature, **options)
    counts = torch.bincount(tokens, minlength=12).double()
    assert counts[p == 0].sum() == 0
    chi_square = float(((counts - N * p)[p > 0].square() / (N * p[p > 0])).sum())
    assert chi_square < 40  # eleven degrees of freedom at most: p = 4e-5
    assert torch.allclose(drawn.double(), p.log()[tokens], atol=1e-5)
    assert torch.allclose(policy, (logits / temperature).log_softmax(-1)[tokens], atol=1e-5)


def test_temperature_zero_takes_the_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 0.0]])
    tokens, drawn, policy = sample(logits, torch.tensor([0.99, 0.99]), 0.0, 0, 1.0, 0.0)
    assert tokens.tolist() == [1, 0]
    assert torch.equal(drawn, policy)


def test_uniform_numbers_are_even_and_independent() -> None:
    keys = torch.tensor([stream_key(0, 0, r, s) for r in range(20) for s in range(20) for _ in range(50)])
    numbers = uniforms(keys, torch.arange(50).repeat(400))
    assert numbers.dtype == torch.float64
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = torch.histc(numbers, 20, 0, 1)
    assert float(((counts - 1000).square() / 1000).sum()) < 50
    assert abs(float(torch.corrcoef(torch.stack((numbers[:-1], numbers[1:])))[0, 1])) < 0.03
    assert stream_key(1, 2, 3) != stream_key(1, 3, 2)


def test_the_devices_part_of_the_hash_is_the_hosts() -> None:
    keys, positions = [stream_key(5, 6, 7, s) for s in range(300)], list(range(300))
    on_device = uniforms(torch.tensor(keys), torch.tensor(positions)).tolist()
    for key, position, number in zip(keys, positions, on_device, strict=True):
        state = (key + position + 0x9E3779B97F4A7C15) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        assert number == ((state ^ (state >> 31)) >> 11) / 2**53


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    import transformers

    logits = torch.randn(2, 10)
    held = torch.tensor([[1, 4, 4], [0, 9, 2]])
    judge = transformers.RepetitionPenaltyLogitsProcessor(1.3)(held, logits.clone())
    seen = torch.zeros(2, 10, dtype=torch.bool).scatter_(1, held, True)
    assert torch.allclose(penalize(logits, seen, 1.3), judge)


def test_of_equals_all_are_kept_or_none() -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, 1.0, 0.0, 1.0]).log_softmax(-1)[None]
    assert filtered(logits, 2, 1.0, 0.0)[0].isfinite().tolist() == [True, False, True, True, False, True]
    share = float(logits[0, 0].exp())
    assert filtered(logits, 0, share - 0.01, 0.0)[0].isfinite().sum() == 1
    assert filtered(logits, 0, share + 0.01, 0.0)[0].isfinite().sum() == 4


def test_filters_keep_at_least_the_most_likely() -> None:
    logits = torch.randn(4, 30)
    kept = filtered(logits, 1, 1e-9, 1.0)
    assert torch.equal(kept.isfinite().sum(-1), torch.ones(4, dtype=torch.int64))
    assert torch.equal(kept.argmax(-1), logits.argmax(-1))
