import pytest
import torch

from qerl.quant import e2m1

GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def test_every_code_decodes_to_its_value_and_back() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = e2m1.decode(codes)
    assert torch.equal(values, torch.cat((GRID, -GRID)))
    again = e2m1.encode(values)
    again[8] = 8  # an exact zero of either sign is code 0
    assert torch.equal(again, codes)


def test_ties_go_to_the_even_code() -> None:
    middles = (GRID[:-1] + GRID[1:]) / 2
    assert e2m1.encode(middles).tolist() == [0, 2, 2, 4, 4, 6, 6]
    above = torch.nextafter(middles, torch.tensor(torch.inf))
    below = torch.nextafter(middles, torch.tensor(-torch.inf))
    assert e2m1.encode(above).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert e2m1.encode(below).tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_rounding_is_to_the_nearest_of_all_values() -> None:
    x = torch.linspace(-8, 8, 100_001)
    nearest = (x[:, None] - torch.cat((GRID, -GRID))).abs().amin(1)
    assert torch.equal((e2m1.decode(e2m1.encode(x)) - x).abs(), nearest)
    step = torch.tensor(0.3)
    expected = e2m1.decode(e2m1.encode(x.abs() / step)) * step
    assert torch.equal(e2m1.round_magnitudes(x.abs(), step), expected)


def test_a_negative_that_rounds_to_zero_keeps_its_sign() -> None:
    assert e2m1.encode(torch.tensor([-1e-9, 1e-9, -0.0, 0.0])).tolist() == [8, 0, 0, 0]


def test_packing_puts_the_even_input_low_and_is_invertible() -> None:
    codes = torch.randint(0, 16, (3, 10), dtype=torch.uint8)
    packed = e2m1.pack(codes)
    assert packed.shape == (3, 5)
    assert torch.equal(packed & 0xF, codes[:, ::2])
    assert torch.equal(packed >> 4, codes[:, 1::2])
    assert torch.equal(e2m1.unpack(packed), codes)
    assert torch.equal(e2m1.decode_packed(packed), e2m1.decode(codes))


def test_an_odd_row_can_not_be_packed() -> None:
    with pytest.raises(ValueError, match="even number"):
        e2m1.pack(torch.zeros(2, 3, dtype=torch.uint8))
