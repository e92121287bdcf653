import pytest
import torch

from qerl.kernels.attention import packed_attention, packed_attention_reference
from tests.kernels.devices import DEVICE, DTYPES, judge, normal


def bounds(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 6, 64])
def test_queries_of_a_segments_end_see_what_they_see_in_the_whole(window: int | None, dtype: torch.dtype) -> None:
    keys, queries = (9, 1, 70, 33), (4, 1, 70, 2)
    q, k, v = (normal(sum(keys), heads, 32, seed=heads, dtype=dtype) for heads in (6, 2, 2))
    ends = torch.cat([torch.arange(end - n, end) for end, n in zip(bounds(keys)[1:].tolist(), queries, strict=True)])
    plain = packed_attention_reference(q, k, v, keys, window)[ends]
    exact = packed_attention_reference(q.float(), k.float(), v.float(), keys, window)[ends]
    judge(packed_attention(q[ends], k, v, (bounds(queries), bounds(keys)), (queries, keys), window), plain, exact)
