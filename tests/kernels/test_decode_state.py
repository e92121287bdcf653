import torch

from qerl.kernels.decode_state import advance
from qerl.kernels.gpu.decode_state import advance as fused_advance
from qerl.kernels.gpu.decode_state import places as fused_places
from tests.kernels.devices import DEVICE, normal


def test_places_are_those_of_the_blocks() -> None:
    table = torch.arange(200, device=DEVICE).view(20, 10).flip(1)
    position = torch.arange(20, device=DEVICE)
    expected = [int(table[i, i // 4]) * 4 + i % 4 for i in range(20)]
    assert fused_places(position, table[:, :5], 4).tolist() == expected


def test_advancing_equals_the_reference() -> None:
    states = []
    for function in (advance, fused_advance):
        numbers = torch.arange(40, device=DEVICE).view(4, 10)[:, :7]
        at = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        tokens = torch.zeros(3, 9, dtype=torch.int64, device=DEVICE)
        logprobs = torch.zeros(2, 3, 9, device=DEVICE)
        for step in range(2):
            drawn = torch.arange(7, device=DEVICE) + 100 * step, normal(7, seed=step), normal(7, seed=step + 5)
            function(numbers, at, tokens[:, :7], logprobs[:, :, :7], drawn)
        states.append((numbers, at, tokens, logprobs))
    for ours, judge in zip(*states, strict=True):
        assert torch.equal(ours, judge)
    numbers, at, tokens, logprobs = states[1]
    assert at.tolist() == [2]
    assert numbers[:, 3].tolist() == [103, 15, 25, 33]
    assert tokens[:, 3].tolist() == [3, 103, 0]
    assert logprobs[1, 1, 3] == normal(7, seed=6)[3]
