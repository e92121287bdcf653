import pytest
import torch

from qerl.kernels.fp8_cache import to_fp8
from qerl.kernels.gpu.paged_attention import MOST_SPLITS, paged_attention, splits_for
from qerl.kernels.paged_attention import paged_attention_reference
from tests.kernels.devices import DEVICE, DTYPES, judge, normal, seeded


def setting(positions: list[int], heads: tuple[int, int, int], size: int, dtype: torch.dtype):
    """q, keys, values, table, position; blocks scattered over a cache, the table a part of a wider tensor."""
    h, g, d = heads
    rows, blocks = len(positions), max(positions) // size + 2
    order = torch.randperm(rows * blocks + 3, generator=seeded(3))[: rows * blocks].view(rows, blocks)
    held = torch.zeros(rows, blocks + 5, dtype=torch.int64)
    held[:, 5:], held[:, 1] = order, torch.tensor(positions)
    held = held.to(DEVICE)
    keys, values = (normal((rows * blocks + 3) * size, g, d, seed=seed, dtype=dtype) for seed in (1, 2))
    return normal(rows, h, d, dtype=dtype), keys, values, held[:, 5:], held[:, 1]


CASES = {
    "grouped": ([0, 63, 64, 200], (14, 2, 64), 16, None),
    "odd head": ([130, 7], (3, 3, 48), 4, None),
    "window": ([0, 40, 300], (8, 2, 32), 16, 100),
    "narrow window": ([90, 3], (4, 2, 16), 8, 1),
    "wide head": ([150], (7, 1, 128), 16, None),
}
LONG = ([700, 450, 5], (4, 2, 16), 16, None)  # more parts than are read at once


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 4, pytest.param(32, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(case: str, splits: int, dtype: torch.dtype) -> None:
    equals_the_reference(*CASES[case], splits, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [8, 32])
def test_contexts_of_many_parts(splits: int, dtype: torch.dtype) -> None:
    equals_the_reference(*LONG, splits, dtype)


def equals_the_reference(
    positions: list[int], heads: tuple[int, int, int], size: int, window: int | None, splits: int, dtype: torch.dtype
) -> None:
    q, keys, values, table, position = setting(positions, heads, size, dtype)
    plain = paged_attention_reference(q, keys, values, table, position, size, window)
    exact = paged_attention_reference(q.float(), keys.float(), values.float(), table, position, size, window)
    counters = torch.zeros(len(positions) * heads[1], dtype=torch.int32, device=DEVICE)
    judge(paged_attention(q, keys, values, table, position, size, window, splits, counters), plain, exact)
    assert not counters.any()  # ready for the next call


def fp8_of(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (k, k_scale), (v, v_scale) = to_fp8(keys), to_fp8(values)
    return k, v, torch.stack((k_scale, v_scale))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_an_fp8_cache_equals_its_reference(case: str, splits: int, dtype: torch.dtype) -> None:
    positions, heads, size, window = CASES[case]
    q, keys, values, table, position = setting(positions, heads, size, dtype)
    k, v, scales = fp8_of(keys * torch.linspace(0.01, 3, len(keys), device=DEVICE)[:, None, None], values)
    args = (table, position, size, window)
    plain = paged_attention_reference(q, k, v, *args, scales_2PG=scales)
    exact = paged_attention_reference(q.float(), k, v, *args, scales_2PG=scales)
    judge(paged_attention(q, k, v, *args, splits, scales_2PG=scales), plain, exact)


def test_fp8_costs_what_its_rounding_may_cost() -> None:
    """Values rounded by a sixteenth at most: so is their mean. With equal keys only values count."""
    q, keys, values, table, position = setting([200, 70], (8, 2, 64), 16, torch.float32)
    k, v, scales = fp8_of(torch.ones_like(keys), values)
    exact = paged_attention_reference(q, torch.ones_like(keys), values, table, position, 16)
    bound = paged_attention_reference(q, torch.ones_like(keys), values.abs(), table, position, 16) / 16
    for ours in (
        paged_attention_reference(q, k, v, table, position, 16, scales_2PG=scales),
        paged_attention(q, k, v, table, position, 16, scales_2PG=scales),
    ):
        assert ((ours - exact).abs() <= bound + 1e-4).all()


@pytest.mark.parametrize("splits", [1, 4])
def test_other_rows_change_nothing(splits: int) -> None:
    q, keys, values, table, position = setting([100, 3, 77], (4, 2, 32), 16, torch.float32)
    whole = paged_attention(q, keys, values, table, position, 16, splits=splits)
    alone = paged_attention(q[2:], keys, values, table[2:], position[2:], 16, splits=splits)
    assert torch.equal(whole[2:], alone)


def test_splits_fill_the_gpu_and_no_more() -> None:
    assert [splits_for(rows * 4, 32768, 132) for rows in (1, 8, 32, 64, 128, 256)] == [32, 8, 2, 1, 1, 1]
    assert splits_for(4, 128, 132) == 2
    assert splits_for(1, 1 << 20, 132) == MOST_SPLITS


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("others", [25, 90])  # programs that have the GPU to themselves, and such as queue
def test_the_shape_of_a_7b_and_long_contexts(window: int | None, others: int) -> None:
    from qerl.kernels.paged_attention import paged_attention as public

    positions = [0, 1, 511, 512, 513, 4095, 8000, 16, *(100 + 37 * i % 900 for i in range(others))]
    q, keys, values, table, position = setting(positions, (28, 4, 128), 16, torch.bfloat16)
    plain = paged_attention_reference(q, keys, values, table, position, 16, window)
    exact = paged_attention_reference(q.float(), keys.float(), values.float(), table, position, 16, window)
    first = public(q, keys, values, table, position, 16, window)
    judge(first, plain, exact)
    for _ in range(20):
        assert torch.equal(public(q, keys, values, table, position, 16, window), first)
