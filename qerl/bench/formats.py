"""Mean squared error of the formats and rounding methods on three kinds of weights."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl.quant import mxfp4, nf4, nvfp4

ROWS, COLUMNS = 1024, 4096


def weights(kind: str, generator: torch.Generator, rows: int = ROWS) -> Tensor:
    """gaussian; laplace; outliers: gaussian with one weight in 200 twenty times as large. All of unit variance."""
    normal = torch.randn(rows, COLUMNS, generator=generator)
    if kind == "laplace":
        uniform = torch.rand(rows, COLUMNS, generator=generator) - 0.5
        normal = -uniform.sign() * torch.log1p(-2 * uniform.abs().clamp(max=0.4999999))
    elif kind == "outliers":
        chosen = torch.rand(rows, COLUMNS, generator=generator) < 0.005
        normal = torch.where(chosen, normal * 20, normal)
    elif kind != "gaussian":
        raise ValueError(f"There are no weights of kind {kind!r}.")
    return normal / normal.std()


@dataclass(frozen=True)
class FormatError:
    """Mean squared errors in units of the weights' variance."""

    weights: str
    format: str
    bits: float
    rtn: float
    mse: float

    @property
    def gain(self) -> float:
        """Share of rtn's squared error that mse removes."""
        return 1 - self.mse / self.rtn


def measure(seed: int = 0, rows: int = ROWS) -> Iterator[FormatError]:
    for kind in ("gaussian", "laplace", "outliers"):
        weight = weights(kind, torch.Generator().manual_seed(seed), rows)
        for name, bits in (("nvfp4", 4.5), ("mxfp4", 4.25), ("nf4", 4.5)):
            errors = {
                method: float((_round_trip(name, weight, method) - weight).square().mean()) for method in ("rtn", "mse")
            }
            yield FormatError(kind, name, bits, errors["rtn"], errors["mse"])


def _round_trip(format: str, weight: Tensor, method: str) -> Tensor:
    if format == "nvfp4":
        return nvfp4.dequantize(nvfp4.quantize(weight, method))
    if format == "mxfp4":
        return mxfp4.dequantize(mxfp4.quantize(weight, method))
    return nf4.dequantize(nf4.quantize(weight, method))
