"""A plain checkpoint folder, written tensor by tensor: memory holds one matrix at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from qerl.export.values import Values
from qerl.quant.checkpoint import INDEX, SINGLE
from qerl.quant.convert import REPORT, copy_companions, not_finite
from qerl.quant.partial import require_space, write_json
from qerl.quant.safetensors_io import Spec, Writer

LARGEST_SHARD = 5_000_000_000  # bytes


def write_plain(
    folder: Path,
    source: Path,
    config: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    values: Values,
    dtype: torch.dtype,
    on_plan: Callable[[int], None],
    on_bytes: Callable[[int], None],
) -> None:
    """Into `folder`: weights in `dtype`, `config` without quantization, and the companions (tokenizer, generation
    settings) of the folder `source`."""
    specs = {name: Spec(dtype, shape) for name, shape in shapes.items()}
    total = sum(spec.nbytes for spec in specs.values())
    require_space(folder, total)
    on_plan(total)
    shards = _shards(specs)
    count = len(shards)
    files = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)] if count > 1 else [SINGLE]
    for file, shard in zip(files, shards, strict=True):
        writer = Writer(folder / file, shard)
        try:
            for name, spec in shard.items():
                value = values.value(name).to(dtype)
                assert tuple(value.shape) == spec.shape, f"{name}: {tuple(value.shape)} is not {spec.shape}"
                if not bool(torch.isfinite(value).all()):
                    raise ValueError(not_finite(name))
                writer.append(name, value)
                on_bytes(spec.nbytes)
            writer.close()
        except BaseException:
            writer.abandon()
            raise
    if count > 1:
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    copy_companions(source, folder)
    (folder / REPORT).unlink(missing_ok=True)  # it speaks of the base
    plain = {key: value for key, value in config.items() if key not in ("torch_dtype", "quantization_config")}
    write_json(folder / "config.json", plain | {"dtype": str(dtype).removeprefix("torch.")})


def _shards(specs: dict[str, Spec]) -> list[dict[str, Spec]]:
    shards: list[dict[str, Spec]] = [{}]
    for name, spec in specs.items():
        filled = sum(each.nbytes for each in shards[-1].values())
        if shards[-1] and filled + spec.nbytes > LARGEST_SHARD:
            shards.append({})
        shards[-1][name] = spec
    return shards
