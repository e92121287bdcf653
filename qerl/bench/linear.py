"""The four linear layers of a decoder block by rows of x: NVFP4 on our kernels against cuBLAS in bf16, with and without
LoRA. Weights rotate among copies larger than the GPU's cache, as the layers of a model do."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from qerl.bench.replay import floor, microseconds
from qerl.kernels.fp4_tiles import Tiles, tile
from qerl.kernels.low_rank import low_rank_buffers
from qerl.model.shapes import Shape, shape_named
from qerl.quant import nvfp4

COPIES_OF = 256 << 20  # bytes of weights that must go by before one comes again


def measure(shape: str, rows: list[int], rank: int, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """A row for each layer and number of rows. Times in microseconds."""
    from qerl.kernels.gpu.fp4_linear import dense_linear, fp4_linear

    if not torch.cuda.is_available():
        raise ValueError("`qerl bench linear` measures GPU kernels: run it on a machine with a GPU.")
    device = torch.device("cuda")
    for layer, (sizes, inputs) in layers(shape_named(shape)).items():
        say(f"{shape} {layer} ...")
        outputs, paired = sum(sizes), layer == "gate_up"
        tiles = _copies(outputs, inputs, device)
        dense = [torch.randn(outputs, inputs, dtype=torch.bfloat16, device=device) for _ in range(3)]
        low = [low_rank_buffers(sizes, inputs, rank, 2.0, torch.bfloat16, device) for _ in tiles]
        for count in rows:
            x = torch.randn(count, inputs, dtype=torch.bfloat16, device=device)
            ours = microseconds([lambda t=t, x=x: fp4_linear(x, t) for t in tiles])  # type: ignore[misc]
            lora = microseconds(
                [lambda t=t, w=w, x=x, p=paired: fp4_linear(x, t, None, w, p) for t, w in zip(tiles, low, strict=True)]  # type: ignore[misc]
            )
            bf16 = microseconds([lambda w=w, x=x: dense_linear(x, w, None, None, False) for w in dense])  # type: ignore[misc]
            least = floor(outputs * inputs * 0.5625, 2.0 * count * outputs * inputs)
            yield {
                "op": "linear", "shape": shape, "layer": layer, "rows": count, "rank": rank, "us": round(ours, 1),
                "with_lora_us": round(lora, 1), "bf16_us": round(bf16, 1), "x_bf16": round(bf16 / ours, 2),
                "of_floor": round(least / ours, 2), "tb_per_s": round(outputs * inputs * 0.5625e-6 / ours, 2),
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


def _copies(outputs: int, inputs: int, device: torch.device) -> list[Tiles]:
    one = tile([nvfp4.quantize(torch.randn(outputs, inputs, device=device))])
    assert one is not None
    count = max(2, -(-COPIES_OF // (one.words.nbytes + one.scales.nbytes)))
    return [one] + [
        Tiles(one.words.clone(), one.scales.clone(), one.divisor_N, one.shape) for _ in range(min(count, 40) - 1)
    ]
