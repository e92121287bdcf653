"""The rival of the benches: NF4 on bitsandbytes' own kernels, as users of QLoRA have it.

Each of the seven projections holds its weight as `BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)` gives it, and multiplies by `matmul_4bit` as
`Linear4bit` does, gradients included. LoRA is two products beside it and an addition, as in peft. Nothing here is part
of the product; model, engine and trainer around the projections are ours.

To be fair, peft's copy of the result and its casts are left out, scaling is done where LoRA is narrow, and the sum is
written at once to where fused projections have it. On a GPU decode steps are captured in graphs like our own:
bitsandbytes launches on the current stream, allocates through torch alone and never waits for the device.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qerl.kernels.swiglu import swiglu
from qerl.model.decoder import Decoder
from qerl.model.layers import Lora, Mode, Projection
from qerl.model.loader import BASES
from qerl.model.shapes import Shape
from qerl.quant.nf4 import BLOCK
from qerl.rl import footprint
from qerl.rl.footprint import Workload

BITSANDBYTES = "bitsandbytes"
RIVALS = ("bf16", BITSANDBYTES)  # what the others are compared with


def require(bases: Sequence[str]) -> None:
    """Raises where a bench can't have one of them, before anything long has begun."""
    known = (*BASES, BITSANDBYTES)
    for base in bases:
        if base not in known:
            raise ValueError(f"There is no base {base!r}; benches know {', '.join(known)}.")
    if BITSANDBYTES in bases:
        try:
            import bitsandbytes  # noqa: F401
        except ImportError as error:
            raise ValueError(
                "The base bitsandbytes measures that library's kernels: pip install bitsandbytes, or leave it out."
            ) from error


def rivals_first(bases: Sequence[str]) -> list[str]:
    """So that the others have their ratio to them."""
    return sorted(bases, key=lambda base: RIVALS.index(base) if base in RIVALS else len(RIVALS))


def ratios(done: dict[tuple[str, int], float], base: str, size: int, seconds: float) -> dict[str, float | None]:
    """How many times as fast as each rival at the same size; None where it was not measured. Notes the seconds."""
    done[base, size] = seconds
    return {f"x_{rival}": round(done[rival, size] / seconds, 3) if (rival, size) in done else None for rival in RIVALS}


def nearest(base: str) -> str:
    """The base of ours that stands for it in settings and plans."""
    return "nf4" if base == BITSANDBYTES else base


def fewest_recomputed(base: str, shape: Shape, load: Workload, gpu: int) -> int:
    """The plan's number of blocks on a GPU of so many bytes; for bitsandbytes with room for silu(gate) * up of each
    block that is not recomputed, which LoRA's plain product keeps."""
    more = load.micro_batch * shape.intermediate * load.item if base == BITSANDBYTES else 0
    count = footprint.fewest_recomputed(shape, load, gpu)
    while count < footprint.fewest_recomputed(shape, load, gpu - more * (shape.layers - count)):
        count += 1
    return count


def hold_bitsandbytes(model: Decoder) -> None:
    """Every projection becomes one on bitsandbytes' kernels, with what it held as its weight. LoRA comes after."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, Projection)
    ]
    if not found:
        raise ValueError("There is no projection in this model for bitsandbytes to hold.")
    for parent, name, child in found:
        setattr(parent, name, BitsandbytesProjection(child, model.dtype))
        child.weight = None  # type: ignore[assignment]  # given back at once: a 32B model is not there twice


class BitsandbytesWeight(nn.Module):
    """The matrices of fused projections, each quantized by itself. scales: the states' tensors, where those look that
    ask a model what its forwards read."""

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        super().__init__()
        from bitsandbytes.functional import quantize_4bit

        self.packed: list[Tensor] = []
        self.states: list[Any] = []
        self.scales: list[Tensor] = []
        for matrix in matrices:
            packed, state = quantize_4bit(matrix, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
            self.packed.append(packed)
            self.states.append(state)
            self.scales += [state.absmax, state.state2.absmax, state.offset]

    def product(self, part: int, x: Tensor, bias: Tensor | None) -> Tensor:
        from bitsandbytes import matmul_4bit

        out: Tensor = matmul_4bit(x, self.packed[part].t(), self.states[part], bias=bias)
        return out


class BitsandbytesProjection(Projection):
    """The seven linear layers apart, though their outputs lie side by side; no kernel of ours serves."""

    weight: BitsandbytesWeight  # type: ignore[assignment]  # forward, which alone reads it, is here

    def __init__(self, plain: Projection, dtype: torch.dtype) -> None:
        assert not plain.lora, "LoRA comes after"
        weight = BitsandbytesWeight(torch.split(plain.weight.dequantized(dtype), list(plain.sizes)))
        super().__init__(plain.parts, plain.sizes, weight, plain.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor, mode: Mode, gated: bool = False) -> Tensor:
        rows = x.flatten(0, -2)
        rows = swiglu(rows) if gated else rows
        biases = [None] * len(self.parts) if self.bias is None else torch.split(self.bias, list(self.sizes))
        wide = [self.weight.product(part, rows, bias) for part, bias in enumerate(biases)]
        if mode.adapter and self.lora:
            low = [_low_rank(rows, self.lora[part]) for part in self.parts]
            y: Tensor = _Sums.apply(*wide, *low)  # type: ignore[no-untyped-call]
        else:
            y = wide[0] if len(wide) == 1 else torch.cat(wide, dim=1)
        return y.view(*x.shape[:-1], y.shape[-1])

    def serves(self, x: Tensor, mode: Mode) -> bool:
        return False

    def lay_out_lora(self, dtype: torch.dtype) -> None:
        """It stays as it is: none of our kernels reads it."""


def _low_rank(x: Tensor, lora: nn.Module) -> Tensor:
    assert isinstance(lora, Lora)
    return F.linear(F.linear(x, lora.a.read()) * lora.scale, lora.b.read())


class _Sums(torch.autograd.Function):
    """[T, N] of the parts and then as many of their LoRA -> the parts' sums, side by side."""

    @staticmethod
    def forward(ctx: Any, *found: Tensor) -> Tensor:
        wide, low = found[: len(found) // 2], found[len(found) // 2 :]
        ctx.sizes = [part.shape[1] for part in wide]
        out = wide[0].new_empty(len(wide[0]), sum(ctx.sizes))
        for one, other, into in zip(wide, low, torch.split(out, ctx.sizes, dim=1), strict=True):
            torch.add(one, other, out=into)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        parts = torch.split(grads[0], ctx.sizes, dim=1)
        return *parts, *parts
