from dataclasses import replace

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from qerl.kernels.gpu.heads import turned as turned_on_gpu
from qerl.kernels.gpu.heads import turned_back
from qerl.kernels.gpu.heads import turned_into_cache as fused
from qerl.kernels.gpu.rope import rope_tables as fused_tables
from qerl.kernels.heads import Heads, turned, turned_into_cache, turned_into_cache_reference, turned_reference
from qerl.kernels.rope import rope_frequencies, rope_tables_reference
from tests.kernels.devices import DEVICE, DTYPES, judge, normal

CASES = {"qwen2": (7, 1, 64, False), "qwen3": (4, 2, 128, True), "odd": (3, 3, 24, True), "many": (28, 4, 128, False)}


def heads_of(case: str, tokens: int, dtype: torch.dtype) -> Heads:
    h, g, d, norms = CASES[case]
    frequencies, factor = rope_frequencies(d, {"rope_theta": 1e4}, 4096)
    positions = torch.arange(tokens, device=DEVICE) * 37
    cos, sin = rope_tables_reference(positions, frequencies.to(DEVICE), factor, dtype)
    gains = (normal(d, seed=1), normal(d, seed=2)) if norms else None
    return Heads(normal(tokens, (h + 2 * g) * d, dtype=dtype), (h, g), cos, sin, gains, 1e-6)


def in_float32(heads: Heads) -> Heads:
    return Heads(heads.qkv_TN.float(), heads.counts, heads.cos.float(), heads.sin.float(), heads.gains, heads.eps)


def last_place(turned_2TGd: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One unit in the last place of what rope adds up, float32. A turn keeps the length of a pair (elements i and
    i + d / 2), of which either may be small where its two products cancel: the unit is that of the length."""
    first, second = turned_2TGd.chunk(2, -1)
    length = torch.hypot(first, second).repeat(1, 1, 1, 2)
    return torch.finfo(dtype).eps * torch.exp2(torch.floor(torch.log2(length)))


def test_the_reference_is_that_of_transformers() -> None:
    heads = heads_of("qwen3", 5, torch.float32)
    q, k, v = heads.qkv_TN.view(5, 8, 128).split([4, 2, 2], dim=1)
    norms = [Qwen3RMSNorm(128, eps=1e-6).to(DEVICE) for _ in range(2)]
    for norm, gain in zip(norms, heads.gains, strict=True):
        norm.weight.data = gain
    theirs = apply_rotary_pos_emb(
        norms[0](q).transpose(0, 1)[None],
        norms[1](k).transpose(0, 1)[None],
        heads.cos[None, :, 0],
        heads.sin[None, :, 0],
    )
    ours = turned_reference(heads)
    for a, b in zip(ours, theirs, strict=False):
        assert torch.allclose(a, b[0].transpose(0, 1), atol=1e-5)
    assert torch.equal(ours[2], v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, pytest.param(70, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_equals_the_reference(case: str, tokens: int, dtype: torch.dtype) -> None:
    heads = heads_of(case, tokens, dtype)
    g, d = CASES[case][1:3]
    places = (torch.randperm(tokens + 6, generator=torch.Generator().manual_seed(4))[:tokens]).to(DEVICE)
    caches = [
        torch.full((2, tokens + 6, g, d), 9.0, dtype=kind, device=DEVICE) for kind in (dtype, dtype, torch.float32)
    ]
    forms = (fused, turned_into_cache_reference)
    ours, plain = (f(heads, *cache, places) for f, cache in zip(forms, caches[:2], strict=True))
    exact = turned_into_cache_reference(in_float32(heads), *caches[2], places)
    judge(ours, plain, exact)
    judge(*caches)
    chosen = turned_into_cache(heads, *caches[1].fill_(9.0), places)  # the kernel on a GPU, else the reference
    assert torch.equal(chosen, ours if DEVICE == "cuda" else plain)
    judge(caches[1], caches[0], caches[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_an_fp8_cache_holds_what_the_reference_writes(case: str, dtype: torch.dtype) -> None:
    heads = heads_of(case, 5, dtype)
    g, d = CASES[case][1:3]
    places = torch.tensor([3, 9, 0, 7, 4], device=DEVICE)
    caches = [torch.zeros(2, 11, g, d, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2)]
    scales = [torch.zeros(2, 11, g, device=DEVICE) for _ in range(2)]
    forms = (fused, turned_into_cache_reference)
    ours, plain = (f(heads, *cache, places, scale) for f, cache, scale in zip(forms, caches, scales, strict=True))
    judge(ours, plain, turned_reference(in_float32(heads))[0])
    assert torch.allclose(*scales, rtol=1e-6 if dtype == torch.float32 else 2**-7)
    codes = [cache.float() for cache in caches]
    assert (codes[0] != codes[1]).float().mean() < (0.01 if DEVICE == "cuda" else 0.1)
    exact = torch.stack(turned_reference(heads)[1:]).float()
    scale = scales[1][:, places, :, None]
    read = [(code * scale[..., None])[:, places] for code, scale in zip(codes, scales, strict=True)]
    half = torch.maximum(exact.abs() / 16, scale * 2**-10)  # of a step of E4M3
    assert ((read[1] - exact).abs() <= half * 1.001).all()
    if DEVICE == "cuda":
        # The kernel does not add up in PyTorch's order, so that what it rounds to E4M3, by half a step, may lie one
        # unit of its last place beside `exact`.
        unit = last_place(exact, dtype)
        assert ((read[0] - exact).abs() <= (half + unit / 16 + unit) * 1.001).all()
    else:  # the interpreter knows nothing below 2^-6, and loses the carry when it rounds up to a power of two
        assert ((read[0] - read[1]).abs() <= torch.maximum(read[1].abs() / 2, scale * 2**-6) * 1.01).all()
    untouched = torch.ones(11, dtype=torch.bool, device=DEVICE).index_fill_(0, places, False)
    assert not codes[0][:, untouched].any()
    assert not scales[0][:, untouched].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [24, 128])
def test_the_tables_equal_the_reference(d: int, dtype: torch.dtype) -> None:
    frequencies, _ = rope_frequencies(d, {"rope_theta": 1e6}, 4096)
    positions = torch.tensor([0, 1, 7, 4095, 131071], device=DEVICE)
    for ours, exact in zip(
        fused_tables(positions, frequencies.to(DEVICE), 1.25, dtype),
        rope_tables_reference(positions, frequencies.to(DEVICE), 1.25, torch.float32),
        strict=True,
    ):
        judge(ours, exact.to(dtype), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_the_training_kernels_equal_autograd_of_the_reference(case: str, dtype: torch.dtype) -> None:
    heads = heads_of(case, 5, dtype)
    h, g, d, _ = CASES[case]
    weights = [normal(5, count, d, seed=3 + i, dtype=dtype) for i, count in enumerate((h, g, g))]

    def outcome(source: Heads, to: torch.dtype) -> list[torch.Tensor]:
        qkv = source.qkv_TN.detach().requires_grad_()
        parts = turned_reference(replace(source, qkv_TN=qkv))
        (grad,) = torch.autograd.grad(parts, qkv, [w.to(to) for w in weights])
        return [torch.cat(parts, 1).flatten(1).detach(), grad]

    plain, exact = outcome(heads, dtype), outcome(in_float32(heads), torch.float32)
    judge(turned_on_gpu(heads), plain[0], exact[0])
    judge(turned_back(heads, *weights), plain[1], exact[1])
    qkv = heads.qkv_TN.detach().requires_grad_()
    ours = turned(replace(heads, qkv_TN=qkv))
    judge(torch.cat(ours, 1).flatten(1).detach(), plain[0], exact[0])
    judge(torch.autograd.grad(ours, qkv, weights)[0], plain[1], exact[1])
