"""The parts of the decoder: weights (dense or 4-bit), projections with LoRA, norms with noise, and their block."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qerl.kernels.choice import fused
from qerl.kernels.fp4_tiles import Tiles, tile
from qerl.kernels.heads import Heads
from qerl.kernels.low_rank import LowRank, kernels_take, low_rank_buffers
from qerl.kernels.nf4_tiles import Nf4Tiles, tile_nf4
from qerl.kernels.quant_linear import Adapter, Part, Scratch, quant_linear
from qerl.kernels.rms_norm import add_rms_norm
from qerl.kernels.swiglu import swiglu
from qerl.model.architecture import PROJECTIONS, Architecture
from qerl.model.trained import Trained
from qerl.quant.layout import Quantized, dequantize_into
from qerl.quant.mxfp4 import MXFP4
from qerl.quant.nf4 import NF4
from qerl.quant.nvfp4 import NVFP4

# attend(layer, heads not yet turned) -> [T, H, d]. Packed sequences and a paged cache bring their own.
Attend = Callable[[int, Heads], Tensor]
Tables = tuple[Tensor, Tensor]  # cos and sin of the tokens' positions


@dataclass(frozen=True)
class Mode:
    """What a forward applies."""

    adapter: bool = True  # LoRA and trained norms; off, the model is the reference policy
    noise: bool = False  # noise beside the norms' gains


class DenseWeight(nn.Module):
    """A weight [N, K] in the compute dtype; frozen, or trained in full."""

    value: Tensor | None

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value
        self.trained: Trained | None = None

    def read(self) -> Tensor:
        if self.trained is not None:
            return self.trained.read()
        assert self.value is not None
        return self.value

    def train_in_full(self) -> None:
        assert self.value is not None
        self.trained = Trained(self.value, self.value.dtype)
        self.value = None

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Itself: for a product that needs no gradient of it."""
        return self.read()


class QuantizedWeight(nn.Module):
    """Frozen matrices in 4 bits, fused along N; each part keeps its own scales, and may be dense (an ignored layer).

    On a CPU, which has no kernel for 4 bits, a dequantized copy is kept. On a GPU with bf16 activations the parts are
    laid out for the kernels instead. scratch: where it is dequantized for training. paired: the parts are gate and up.
    """

    def __init__(
        self,
        parts: list[Quantized | Tensor],
        dtype: torch.dtype,
        keep_copy: bool,
        scratch: Scratch | None = None,
        paired: bool = False,
    ) -> None:
        super().__init__()
        self.scratch = scratch or Scratch()
        self.parts = parts
        self.tiles = _tiles(parts, paired) if not keep_copy and dtype == torch.bfloat16 else None
        if self.tiles is not None:
            self.parts = []
        self.kept = self.dense(dtype) if keep_copy else None

    @property
    def shape(self) -> tuple[int, int]:
        if self.tiles is not None:
            return self.tiles.shape
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def dense(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """The whole matrix [N, K], dequantized; into `out` if there is one, of this dtype."""
        if isinstance(self.tiles, Nf4Tiles):
            from qerl.kernels.gpu.nf4_linear import dequantize_nf4

            return dequantize_nf4(self.tiles, out).to(dtype)
        if self.tiles is not None:
            from qerl.kernels.gpu.fp4_tiled import dequantize_tiles

            return dequantize_tiles(self.tiles, out).to(dtype)
        device = _first_tensor(self.parts[0]).device
        whole = torch.empty(self.shape, dtype=dtype, device=device) if out is None else out
        start = 0
        for part in self.parts:
            into = whole[start : start + part.shape[0]]
            into.copy_(part) if isinstance(part, Tensor) else dequantize_into(part, into)
            start += part.shape[0]
        return whole

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The same in memory that all layers share: valid until the next layer's."""
        if self.kept is not None:
            return self.kept
        device = (self.tiles.words if self.tiles is not None else _first_tensor(self.parts[0])).device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return self.dense(dtype)  # a graph must not hold on to memory that is given back when a larger is asked for
        return self.dense(dtype, self.scratch.matrix(self.shape, dtype, device))


def _first_tensor(part: Quantized | Tensor) -> Tensor:
    return part if isinstance(part, Tensor) else part.packed


def _tiles(parts: list[Quantized | Tensor], paired: bool) -> Tiles | Nf4Tiles | None:
    """None where the kernels do not serve: 16-bit parts, two formats, NF4 blocks that straddle rows, no GPU."""
    normal = [part for part in parts if isinstance(part, NF4)]
    if len(normal) == len(parts) and all(part.packed.is_cuda for part in normal):
        return tile_nf4(normal)
    for kind in (NVFP4, MXFP4):
        found = [part for part in parts if isinstance(part, kind)]
        if len(found) == len(parts) and all(part.packed.is_cuda for part in found):
            return tile(found, paired)
    return None


Weight = DenseWeight | QuantizedWeight


@dataclass(frozen=True)
class LoraSettings:
    """What an adapter is made of; names as in PEFT's LoraConfig."""

    r: int = 32
    lora_alpha: float = 64
    target_modules: tuple[str, ...] | str = PROJECTIONS  # names or endings of names; a regular expression; "all-linear"
    use_rslora: bool = False
    train_norms: bool = False  # the two norms of every block as well

    @property
    def scale(self) -> float:
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


class Lora(nn.Module):
    """delta = scale * B (A x) for one projection; A [r, K], B [N, r]."""

    def __init__(self, a_RK: Tensor, b_NR: Tensor, scale: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.a, self.b, self.scale = Trained(a_RK, dtype), Trained(b_NR, dtype), scale


class Projection(nn.Module):
    """One or several linear layers over the same input, fused along N; LoRA stays apart for each of them."""

    bias: Tensor | None

    def __init__(self, parts: tuple[str, ...], sizes: tuple[int, ...], weight: Weight, bias: Tensor | None) -> None:
        super().__init__()
        self.parts, self.sizes, self.weight, self.bias = parts, sizes, weight, bias
        self.trained_bias: Trained | None = None
        self.lora = nn.ModuleDict()
        self.low: LowRank | None = None  # the same LoRA as kernels read it, on a GPU
        self.stacked: tuple[Adapter, tuple[Tensor, ...]] | None = None  # and as training takes it, where `low` is

    def forward(self, x: Tensor, mode: Mode, gated: bool = False) -> Tensor:
        """gated: x is gate and up side by side, and silu(gate) * up the input."""
        if self.serves(x, mode):
            return self._fused(swiglu(x) if gated else x, mode, gated=False)
        rows = x.flatten(0, -2)
        if isinstance(self.weight, DenseWeight) and self.weight.trained is not None:
            bias = self.bias if self.trained_bias is None else self.trained_bias.read()
            y = F.linear(swiglu(rows) if gated else rows, self.weight.read(), bias)
        else:
            adapter, masters = (self.stacked or self._stack()) if mode.adapter and self.lora else (None, ())
            y = quant_linear(rows, self.weight.dequantized, self.bias, adapter, masters, gated)
        return y.view(*x.shape[:-1], y.shape[-1])

    def gated(self, x: Tensor, mode: Mode) -> Tensor:
        """silu(first half of the outputs) * second half: gate and up, where kernels serve."""
        return self._fused(x, mode, gated=True)

    def serves(self, x: Tensor, mode: Mode) -> bool:
        """Whether kernels can do it all: no gradients, bf16 on a GPU, and LoRA in their layout."""
        ready = self.low is not None or not self.lora or not mode.adapter
        tiled = isinstance(self.weight, DenseWeight) or self.weight.tiles is not None
        trains = torch.is_grad_enabled() and (x.requires_grad or self.lora or self.trained_bias is not None)
        return ready and tiled and not trains and x.dtype == torch.bfloat16 and fused(x)

    def _fused(self, x: Tensor, mode: Mode, gated: bool) -> Tensor:
        from qerl.kernels.gpu.fp4_linear import dense_linear, fp4_linear
        from qerl.kernels.gpu.nf4_linear import nf4_linear

        rows = x.flatten(0, -2)
        low = self.low if mode.adapter else None
        bias = self.bias if self.trained_bias is None else self.trained_bias.read()
        if isinstance(self.weight, DenseWeight):
            y = dense_linear(rows, self.weight.read(), bias, low, gated)
        elif isinstance(self.weight.tiles, Nf4Tiles):
            y = nf4_linear(rows, self.weight.tiles, bias, low, gated)
        else:
            assert self.weight.tiles is not None
            y = fp4_linear(rows, self.weight.tiles, bias, low, gated)
        return y.view(*x.shape[:-1], y.shape[-1])

    def lay_out_lora(self, dtype: torch.dtype) -> None:
        """Put LoRA's copies where kernels read them together, where the parts' sizes let them."""
        parts = [self.lora[part] for part in self.parts if part in self.lora]
        if not parts or not kernels_take(self.sizes):
            return
        first = parts[0]
        assert isinstance(first, Lora)
        rank, inputs = first.a.master.shape
        low = low_rank_buffers(self.sizes, inputs, rank, first.scale, dtype, first.a.master.device)
        for a, b, part in zip(
            torch.split(low.a, low.rank), torch.split(low.b, list(self.sizes)), self.parts, strict=True
        ):
            if part in self.lora:
                lora = self.lora[part]
                assert isinstance(lora, Lora)
                lora.a.lie_in(a[:rank])
                lora.b.lie_in(b[:, :rank])
        self.low = low
        self.stacked = self._stack()

    def _stack(self) -> tuple[Adapter, tuple[Tensor, ...]]:
        """LoRA as a training forward takes it, and its masters. Laid out for kernels it is made once: its tensors are
        written in place."""
        found, masters, stacked, parts, start, row = [], [], [], [], 0, 0
        for part, size in zip(self.parts, self.sizes, strict=True):
            if part in self.lora:
                lora = self.lora[part]
                assert isinstance(lora, Lora)
                found.append(lora)
                a, b = lora.a.value(), lora.b.value()
                stacked.append(a)
                parts.append(Part(slice(row, row + len(a)), slice(start, start + size), b))
                masters += [lora.a.master, lora.b.master]
                row += len(a) if self.low is None else 0
            start += size
            row += self.low.rank if self.low is not None else 0
        whole = self.low.a if self.low is not None else stacked[0] if len(stacked) == 1 else torch.cat(stacked)
        return Adapter(whole, tuple(parts), found[0].scale, start), tuple(masters)

    def train_in_full(self) -> None:
        assert isinstance(self.weight, DenseWeight), "only a 16-bit base can be trained in full"
        self.weight.train_in_full()
        if self.bias is not None:
            self.trained_bias, self.bias = Trained(self.bias, self.bias.dtype), None


class RMSNorm(nn.Module):
    """A norm whose gain is float32; it may be trained, and may take noise (a buffer beside the gain)."""

    def __init__(self, weight_D: Tensor, eps: float, takes_noise: bool = False) -> None:
        super().__init__()
        self.weight_D, self.eps = weight_D.to(torch.float32), eps
        self.trained: nn.Parameter | None = None
        self.noise_D = torch.zeros_like(self.weight_D) if takes_noise else None

    def gain(self, mode: Mode) -> Tensor:
        return self.trained if self.trained is not None and mode.adapter else self.weight_D

    def forward(self, x: Tensor, delta: Tensor | None, mode: Mode) -> tuple[Tensor, Tensor]:
        """x + delta (x itself where delta is None), and its norm."""
        noise_D = self.noise_D if mode.noise else None
        return add_rms_norm(x, delta, self.gain(mode), self.eps, noise_D)

    def train_gain(self) -> None:
        """The arithmetic is float32 anyway, so forwards read the trained gain itself."""
        self.trained = nn.Parameter(self.weight_D.clone())


class Attention(nn.Module):
    def __init__(
        self,
        arch: Architecture,
        layer: int,
        qkv: Projection,
        o: Projection,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
    ) -> None:
        super().__init__()
        self.arch, self.layer, self.qkv, self.o, self.q_norm, self.k_norm = arch, layer, qkv, o, q_norm, k_norm

    def forward(self, x_TD: Tensor, tables: Tables, attend: Attend, mode: Mode) -> Tensor:
        counts, gains, eps = (self.arch.heads, self.arch.kv_heads), None, 0.0
        if self.q_norm is not None and self.k_norm is not None:
            gains, eps = (self.q_norm.gain(mode), self.k_norm.gain(mode)), self.q_norm.eps
        out = attend(self.layer, Heads(self.qkv(x_TD, mode), counts, *tables, gains, eps))
        projected: Tensor = self.o(out.flatten(-2), mode)
        return projected


class Mlp(nn.Module):
    def __init__(self, gate_up: Projection, down: Projection) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down

    def forward(self, x_TD: Tensor, mode: Mode) -> Tensor:
        if self.gate_up.serves(x_TD, mode):
            out: Tensor = self.down(self.gate_up.gated(x_TD, mode), mode)
        else:
            out = self.down(self.gate_up(x_TD, mode), mode, gated=True)
        return out


class Block(nn.Module):
    """A decoder block. Only these two norms take noise: the first feeds q, k, v, the second gate and up.

    What a block adds last is handed on beside x, not yet added: the norm that follows does both in one operation.
    """

    def __init__(self, input_norm: RMSNorm, attention: Attention, post_attention_norm: RMSNorm, mlp: Mlp) -> None:
        super().__init__()
        self.input_norm, self.attention = input_norm, attention
        self.post_attention_norm, self.mlp = post_attention_norm, mlp

    def forward(
        self, x_TD: Tensor, delta_TD: Tensor | None, tables: Tables, attend: Attend, mode: Mode
    ) -> tuple[Tensor, Tensor]:
        x_TD, normed_TD = self.input_norm(x_TD, delta_TD, mode)
        x_TD, normed_TD = self.post_attention_norm(x_TD, self.attention(normed_TD, tables, attend, mode), mode)
        return x_TD, self.mlp(normed_TD, mode)
