"""The training product with LoRA, judged by PyTorch's autograd over the plain formula."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from qerl.kernels.quant_linear import Adapter, Part, Scratch, quant_linear
from tests.kernels.devices import DEVICE, judge, normal

SIZES, K, RANK, SCALE = (48, 16, 32), 40, 4, 1.5


@dataclass(frozen=True)
class Case:
    """Three fused projections over one input."""

    weight: Tensor
    bias: Tensor | None
    a: dict[int, Tensor]  # masters by projection
    b: dict[int, Tensor]

    def adapter(self, dtype: torch.dtype, padding: int = 0) -> Adapter:
        """padding: rows of zero between the A."""
        parts, stacked, row = [], [], 0
        for i in self.a:
            start = sum(SIZES[:i])
            b = self.b[i].detach().to(dtype)
            parts.append(Part(slice(row, row + RANK), slice(start, start + SIZES[i]), b))
            stacked += [self.a[i].detach().to(dtype), torch.zeros(padding, K, dtype=dtype, device=DEVICE)]
            row += RANK + padding
        return Adapter(torch.cat(stacked), tuple(parts), SCALE, sum(SIZES))

    @property
    def masters(self) -> tuple[Tensor, ...]:
        return tuple(master for i in self.a for master in (self.a[i], self.b[i]))

    def plain(self, x: Tensor, gated: bool) -> Tensor:
        """The formula as anybody would write it, in x's dtype."""
        if gated:
            gate, up = x.chunk(2, -1)
            x = F.silu(gate) * up
        y = F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        deltas = [
            F.linear(F.linear(x, self.a[i].to(x.dtype)), self.b[i].to(x.dtype)) * SCALE
            if i in self.a
            else y.new_zeros(len(x), size)
            for i, size in enumerate(SIZES)
        ]
        return y + torch.cat(deltas, -1)


def case(chosen: tuple[int, ...], biased: bool) -> Case:
    a = {i: (normal(RANK, K, seed=10 + i) * K**-0.5).requires_grad_() for i in chosen}
    b = {i: normal(SIZES[i], RANK, seed=20 + i).requires_grad_() for i in chosen}
    return Case(normal(sum(SIZES), K, seed=1) * K**-0.5, normal(sum(SIZES), seed=2) if biased else None, a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("chosen", "biased", "padding"), [((0, 1, 2), True, 0), ((0, 2), False, 3), ((1,), True, 2), ((0, 1, 2), False, 0)]
)
def test_values_and_gradients_are_those_of_autograd(
    chosen: tuple[int, ...], biased: bool, padding: int, gated: bool, dtype: torch.dtype
) -> None:
    one = case(chosen, biased)
    x = normal(11, 2 * K if gated else K, dtype=dtype)
    weights = normal(11, sum(SIZES), seed=3)
    bias = None if one.bias is None else one.bias.to(dtype)

    def outcome(ours: bool, to: torch.dtype) -> list[Tensor]:
        leaf = x.to(to).requires_grad_()
        inputs = leaf * 1.0  # the gated form overwrites what it is given
        if ours:
            read = one.weight.to(to)
            y = quant_linear(inputs, lambda _: read, bias, one.adapter(to, padding), one.masters, gated)
        else:
            y = one.plain(inputs, gated)
        grads = torch.autograd.grad((y.float() * weights).sum(), (leaf, *one.masters))
        return [y.detach(), *grads]

    for got, low, exact in zip(outcome(True, dtype), outcome(False, dtype), outcome(False, torch.float32), strict=True):
        judge(got.to(dtype), low.to(dtype), exact)


@pytest.mark.parametrize("gated", [False, True])
def test_without_lora_only_the_input_gets_a_gradient(gated: bool) -> None:
    one = case((), True)
    x = normal(5, 2 * K if gated else K).requires_grad_()
    y = quant_linear(x * 1.0, lambda dtype: one.weight, one.bias, gated=gated)
    exact = one.plain(x, gated)
    assert torch.allclose(y, exact, atol=1e-5)
    ours, theirs = (torch.autograd.grad(out.square().sum(), x)[0] for out in (y, exact))
    assert torch.allclose(ours, theirs, atol=1e-4)


def test_an_input_without_gradient_is_left_alone() -> None:
    one, calls = case((0, 1, 2), False), []
    x = normal(5, K)
    y = quant_linear(x, lambda _: calls.append(1) or one.weight, None, one.adapter(torch.float32), one.masters)
    ours = torch.autograd.grad(y.square().sum(), one.masters)
    assert len(calls) == 1  # no dx
    theirs = torch.autograd.grad(one.plain(x, False).square().sum(), one.masters)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-3, rtol=1e-4)


def test_recomputed_the_last_product_is_not_made_again() -> None:
    one, calls = case((0, 1, 2), False), []

    def dequantize(dtype: torch.dtype) -> Tensor:
        calls.append(dtype)
        return one.weight

    def block(x: Tensor) -> Tensor:
        return quant_linear(x * 2.0, dequantize, None, one.adapter(torch.float32), one.masters)

    x = normal(5, K).requires_grad_()
    y = checkpoint(block, x, use_reentrant=False)
    again = torch.autograd.grad(y.square().sum(), (x, *one.masters))
    assert len(calls) == 2  # forward and dx
    plain = torch.autograd.grad(block(x).square().sum(), (x, *one.masters))
    for a, b in zip(again, plain, strict=True):
        assert torch.equal(a, b)


def test_scratch_is_kept_and_grows() -> None:
    scratch, where = Scratch(), torch.device("cpu")
    large = scratch.matrix((8, 4), torch.float32, where)
    small = scratch.matrix((2, 4), torch.float32, where)
    assert small.data_ptr() == large.data_ptr()
    assert small.shape == (2, 4)
    assert scratch.matrix((8, 8), torch.float32, where).shape == (8, 8)
    assert scratch.matrix((2, 2), torch.bfloat16, where).dtype == torch.bfloat16
