"""The four linear layers of a decoder block by rows of x: 4 bits on our kernels against cuBLAS in bf16, with and
without LoRA; NF4 against bitsandbytes too, where it is installed. Weights rotate among copies larger than the GPU's
cache, as the layers of a model do. With LoRA, as in a decode step, gate_up also joins gate and up (SwiGLU)."""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qerl.bench.replay import floor, microseconds
from qerl.kernels.fp4_tiles import tile
from qerl.kernels.low_rank import LowRank, low_rank_buffers
from qerl.kernels.nf4_tiles import Nf4Tiles, tile_nf4
from qerl.model.shapes import Shape, shape_named
from qerl.quant import nf4, nvfp4

COPIES_OF = 256 << 20  # bytes of weights that must go by before one comes again
MOST_COPIES = 40
BYTES = 0.5625  # a weight, scales included: both formats have 4.5 bits
FORMATS = ("nvfp4", "nf4")

Linear = Callable[[Tensor, LowRank | None, bool], Tensor]  # x, LoRA, whether gate and up are to be joined


def measure(
    shape: str, rows: list[int], rank: int, say: Callable[[str], None], format: str = "nvfp4"
) -> Iterator[dict[str, Any]]:
    """A row for each layer and number of rows. Times in microseconds."""
    found = layers(shape_named(shape))
    if format not in FORMATS:
        raise ValueError(f"`qerl bench linear` knows {' and '.join(FORMATS)}, not {format!r}.")
    if not torch.cuda.is_available():
        raise ValueError("`qerl bench linear` measures GPU kernels: run it on a machine with a GPU.")
    if importlib.util.find_spec("triton") is None:
        raise ValueError("`qerl bench linear` measures Triton kernels, and there is no triton: pip install triton.")
    from qerl.kernels.gpu.fp4_linear import dense_linear

    device = torch.device("cuda")
    for layer, (sizes, inputs) in found.items():
        say(f"{shape} {layer} as {format} ...")
        outputs, paired = sum(sizes), layer == "gate_up"
        copies = min(MOST_COPIES, max(2, -(-COPIES_OF // int(outputs * inputs * BYTES))))
        if format == "nf4":
            weights, theirs = _nf4(outputs, inputs, copies, device)
        else:
            weights, theirs = _nvfp4(outputs, inputs, paired, copies, device), []
        dense = [torch.randn(outputs, inputs, dtype=torch.bfloat16, device=device) for _ in range(3)]
        low = [low_rank_buffers(sizes, inputs, rank, 2.0, torch.bfloat16, device) for _ in weights]
        for count in rows:
            x = torch.randn(count, inputs, dtype=torch.bfloat16, device=device)
            ours = microseconds([lambda f=f, x=x: f(x, None, False) for f in weights])  # type: ignore[misc]
            lora = microseconds(
                [lambda f=f, w=w, x=x, p=paired: f(x, w, p) for f, w in zip(weights, low, strict=True)]  # type: ignore[misc]
            )
            bf16 = microseconds([lambda w=w, x=x: dense_linear(x, w, None, None, False) for w in dense])  # type: ignore[misc]
            peer = microseconds([lambda f=f, x=x: f(x) for f in theirs]) if theirs else None  # type: ignore[misc]
            least = floor(outputs * inputs * BYTES, 2.0 * count * outputs * inputs)
            yield {
                "op": "linear", "shape": shape, "format": format, "layer": layer, "rows": count, "rank": rank,
                "us": round(ours, 1), "with_lora_us": round(lora, 1), "bf16_us": round(bf16, 1),
                "x_bf16": round(bf16 / ours, 2), "bitsandbytes_us": "" if peer is None else round(peer, 1),
                "of_floor": round(least / ours, 2), "tb_per_s": round(outputs * inputs * BYTES * 1e-6 / ours, 2),
            }  # fmt: skip


def layers(shape: Shape) -> dict[str, tuple[tuple[int, ...], int]]:
    """N of each part, and K."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "qkv": ((q, kv, kv), shape.hidden),
        "o": ((shape.hidden,), q),
        "gate_up": ((shape.intermediate, shape.intermediate), shape.hidden),
        "down": ((shape.hidden,), shape.intermediate),
    }


def _nvfp4(outputs: int, inputs: int, paired: bool, copies: int, device: torch.device) -> list[Linear]:
    from qerl.kernels.gpu.fp4_linear import fp4_linear

    one = tile([nvfp4.quantize(torch.randn(outputs, inputs, device=device))], paired)
    assert one is not None
    tiles = [replace(one, words=one.words.clone(), scales=one.scales.clone()) for _ in range(copies)]
    return [lambda x, low, joined, t=t: fp4_linear(x, t, None, low, joined) for t in tiles]  # type: ignore[misc]


def _nf4(outputs: int, inputs: int, copies: int, device: torch.device) -> tuple[list[Linear], list[Any]]:
    from qerl.kernels.gpu.nf4_linear import nf4_linear

    packed = torch.randint(0, 256, (outputs * inputs // 2,), dtype=torch.uint8, device=device)
    absmax = torch.rand(outputs * inputs // nf4.BLOCK, device=device)
    one = tile_nf4([nf4.NF4(packed, absmax, (outputs, inputs))])
    assert one is not None
    tiles = [Nf4Tiles(one.words.clone(), one.absmax.clone(), one.table, one.shape) for _ in range(copies)]
    ours: list[Linear] = [lambda x, low, paired, t=t: nf4_linear(x, t, None, low, paired) for t in tiles]  # type: ignore[misc]
    try:
        import bitsandbytes
    except ImportError:
        return ours, []
    theirs = []
    for _ in tiles:
        state = bitsandbytes.functional.QuantState(
            absmax.clone(), torch.Size((outputs, inputs)), one.table, nf4.BLOCK, "nf4", torch.bfloat16
        )
        codes = packed.clone().view(-1, 1)
        theirs.append(lambda x, c=codes, s=state: bitsandbytes.matmul_4bit(x, c, s))
    return ours, theirs
