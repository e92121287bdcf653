"""Shared prompts, judged by the plain packing: every sequence with a prompt of its own."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qerl.kernels.attention import packed_attention_reference
from qerl.kernels.expand import copies, expand
from qerl.model.adapter import trained_parameters
from qerl.model.decoder import Decoder
from qerl.model.loader import load
from qerl.model.noise import set_noise
from qerl.model.packing import Continued, next_tokens, pack, pack_shared
from tests.conftest import tiny_model
from tests.kernels.devices import DEVICE, DTYPES, judge, normal
from tests.model.test_decoder import lora_model
from tests.model.variants import VARIANTS

# A prompt of one token, completions of one token and of none (first and later), one completion, several groups.
SHAPES = [(7, (5, 1, 12)), (1, (3, 3)), (4, (6,)), (9, (0, 2, 0)), (2, (1, 1, 1, 1)), (1, (1,)), (30, (4, 25))]
Shape = tuple[int, tuple[int, ...]]


def drawn(shapes: list[Shape], seed: int = 0) -> list[Continued]:
    draw = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [draw.randrange(256) for _ in range(count)]

    return [Continued(ids(prompt), [ids(count) for count in counts]) for prompt, counts in shapes]


def sequences(groups: list[Continued]) -> list[list[int]]:
    return [[*group.prompt, *completion] for group in groups for completion in group.completions]


def plain_places(groups: list[Continued]) -> Tensor:
    """Where the completions' tokens are predicted in the plain packing."""
    places, start = [], 0
    for group in groups:
        for completion in group.completions:
            first = start + len(group.prompt) - 1
            places += range(first, first + len(completion))
            start += len(group.prompt) + len(completion)
    return torch.tensor(places)


def test_a_prompt_lies_there_once_and_its_completions_go_on_from_it() -> None:
    packed, places, targets = pack_shared([Continued([1, 2], [[3], [4, 5], []]), Continued([6], [[7]])])
    assert packed.ids_T.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert packed.positions_T.tolist() == [0, 1, 2, 2, 3, 0, 1]
    assert packed.lengths == (3, 2, 2)
    assert packed.keys is not None
    assert packed.keys.lengths == (3, 4, 2)
    assert packed.keys.copied.rows_N.tolist() == [0, 1, 2, 0, 1, 3, 4, 5, 6]
    assert places.rows_N.tolist() == [1, 1, 3, 5]
    assert targets.tolist() == [3, 4, 5, 7]
    with pytest.raises(ValueError, match="must have a token"):
        pack_shared([Continued([], [[1]])])


def test_one_completion_a_prompt_is_the_plain_packing() -> None:
    groups = drawn([(3, (4,)), (1, (1,)), (5, (2,))])
    shared, _, _ = pack_shared(groups)
    plain = pack(sequences(groups))
    assert shared.keys is None
    assert shared.lengths == plain.lengths
    for name in ("ids_T", "positions_T", "bounds_S1"):
        assert torch.equal(getattr(shared, name), getattr(plain, name))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 6, 64])
def test_attention_and_its_gradients(window: int | None, dtype: torch.dtype) -> None:
    """On a GPU in bf16 this is flash attention with more keys than queries, forward and backward."""
    shapes = [*SHAPES, (130, (70, 1, 200, 64)), (64, (64, 64))]
    groups = drawn(shapes)
    packed, _, _ = pack_shared(groups, DEVICE)
    assert packed.keys is not None
    # The keys are the tokens of the plain packing. Where each token of the shared row lies first among them:
    full, lengths = packed.keys.copied.rows_N, packed.keys.lengths
    first = torch.tensor([full.tolist().index(t) for t in range(len(packed.ids_T))], device=DEVICE)
    inputs = [normal(len(packed.ids_T), heads, 32, seed=i, dtype=dtype) for i, heads in enumerate((6, 2, 2))]
    weight = normal(len(packed.ids_T), 6, 32, seed=9)

    def outcome(attend: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = attend(*leaves)
        return [out, *torch.autograd.grad(out, leaves, weight.to(out.dtype))]

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return packed_attention_reference(q[full], k[full], v[full], lengths, window)[first]

    ours = outcome(lambda q, k, v: packed.attend(q, k, v, window), dtype)
    for a, b, c in zip(ours, outcome(plain, dtype), outcome(plain, torch.float32), strict=True):
        judge(a, b, c)


def outcome(model: Decoder, groups: list[Continued], shared: bool, **options: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of the completions' tokens, and the gradient of their weighted sum."""
    if shared:
        packed, places, targets = pack_shared(groups, model.device)
    else:
        packed = pack(sequences(groups), model.device)
        at = plain_places(groups)
        places, targets = copies(at, len(packed.ids_T), model.device), packed.ids_T[at + 1]
    logp, _ = model.logprobs(expand(model(packed, **options), places), targets)
    weight = torch.sin(torch.arange(len(logp)) + 1.0)
    parameters = trained_parameters(model)
    gradients = torch.autograd.grad((logp * weight).sum(), list(parameters.values()))
    return logp.detach(), dict(zip(parameters, gradients, strict=True))


def compare(model: Decoder, groups: list[Continued], **options: bool) -> None:
    logp, gradients = outcome(model, groups, shared=True, **options)
    plain, expected = outcome(model, groups, shared=False, **options)
    assert torch.allclose(logp, plain, atol=1e-5, rtol=0)
    for name, gradient in gradients.items():
        error = float((gradient - expected[name]).norm())
        assert error <= 1e-5 * float(expected[name].norm()) + 1e-7, name


@pytest.mark.parametrize("variant", ["qwen2-sliding", "qwen2-yarn", "qwen3-biased", "llama3-rope", "mistral-sliding"])
def test_log_probs_and_gradients_are_those_of_the_plain_packing(
    make_checkpoint: Callable[..., Path], variant: str
) -> None:
    family, changes = VARIANTS[variant]
    model = lora_model(make_checkpoint(family, torch.float32, **changes), base="bf16", device="cpu")
    compare(model, drawn(SHAPES))
    compare(model, drawn(SHAPES), recompute=True)
    set_noise(model, 0.1, torch.Generator().manual_seed(0))
    compare(model, drawn(SHAPES), noise=True)


def test_on_a_4_bit_base_and_with_all_weights_trained(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_checkpoint("qwen2", torch.float32)
    options = {"device": "cpu", "dtype": torch.float32}
    compare(lora_model(folder, base="nvfp4", cache_dir=tmp_path / "cache", **options), drawn(SHAPES))
    full = load(str(folder), base="bf16", **options)
    full.train_in_full()
    compare(full, drawn(SHAPES))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("shared")
    tiny_model("qwen2", torch.float32, **VARIANTS["qwen2-sliding"][1]).save_pretrained(folder)
    return lora_model(folder, base="bf16", device="cpu")


@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 20), st.lists(st.integers(0, 12), min_size=1, max_size=5).map(tuple)),
        min_size=1,
        max_size=4,
    ).filter(lambda shapes: any(n for _, ns in shapes for n in ns)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_any_pack(model: Decoder, shapes: list[Shape], seed: int) -> None:
    compare(model, drawn(shapes, seed=seed))


def test_tokens_of_shared_packs_are_predicted_where_they_say() -> None:
    packed, _, _ = pack_shared([Continued([1], [[2], [3]])])
    with pytest.raises(AssertionError, match="pack_shared says where"):
        next_tokens(packed)
