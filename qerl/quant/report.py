"""What quantization cost: sizes, and each layer's relative error |W_hat - W| / |W| (Frobenius)."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

WORST = 10


@dataclass(frozen=True)
class LayerError:
    """Sums over one quantized weight."""

    module: str
    numel: int
    nbytes: int  # stored: codes and scales
    squared_error: float | None  # None where the method rescales weights, so that none can be measured
    squared_norm: float


def relative_error(layers: Iterable[LayerError]) -> float | None:
    """|W_hat - W| / |W| over all of these layers together."""
    error = norm = 0.0
    for layer in layers:
        if layer.squared_error is None:
            return None
        error, norm = error + layer.squared_error, norm + layer.squared_norm
    return math.sqrt(error / norm) if norm else 0.0


@dataclass(frozen=True)
class Report:
    model: str
    format: str
    method: str
    bytes_before: int
    bytes_after: int
    layers: tuple[LayerError, ...]
    ignored: tuple[str, ...]
    seconds: float

    @property
    def bits_per_weight(self) -> float:
        """Stored bits a quantized weight, scales included."""
        return 8 * sum(layer.nbytes for layer in self.layers) / sum(layer.numel for layer in self.layers)

    def by_kind(self) -> dict[str, dict[str, Any]]:
        """Relative error by the last part of the layer's name (q_proj, down_proj, ...)."""
        kinds: dict[str, list[LayerError]] = {}
        for layer in self.layers:
            kinds.setdefault(layer.module.rpartition(".")[2], []).append(layer)
        return {
            kind: {
                "layers": len(layers),
                "weights": sum(layer.numel for layer in layers),
                "relative_error": relative_error(layers),
            }
            for kind, layers in kinds.items()
        }

    def worst(self) -> list[tuple[str, float]]:
        """The layers that lost most, with their relative error; empty where errors do not apply."""
        errors = [(layer.module, relative_error([layer])) for layer in self.layers]
        known = [(module, error) for module, error in errors if error is not None]
        return sorted(known, key=lambda entry: -entry[1])[:WORST]

    def summary(self) -> dict[str, Any]:
        """What a command's last line carries."""
        return {
            "model": self.model,
            "format": self.format,
            "method": self.method,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "bits_per_weight": round(self.bits_per_weight, 4),
            "quantized_layers": len(self.layers),
            "relative_error": relative_error(self.layers),
            "relative_error_by_kind": {kind: row["relative_error"] for kind, row in self.by_kind().items()},
            "worst": [{"module": module, "relative_error": error} for module, error in self.worst()],
            "ignored": list(self.ignored),
            "seconds": round(self.seconds, 3),
        }

    def to_json(self) -> dict[str, Any]:
        """The whole report, as it lies beside the weights."""
        layers = [asdict(layer) | {"relative_error": relative_error([layer])} for layer in self.layers]
        return self.summary() | {"kinds": self.by_kind(), "layers": layers}
