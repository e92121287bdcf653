"""What this machine can measure: asked before any work, since a process that runs out of memory on a CPU is killed."""

from collections.abc import Sequence
from pathlib import Path

import torch

from qerl.model.shapes import shape_named

ON_A_GPU, ON_A_CPU = "qwen2.5-7b", "toy"
ITEM = 4  # bytes of a weight on a CPU, whatever the base: 4-bit layers keep a dequantized copy in float32


def default_shape(device: torch.device) -> str:
    return ON_A_GPU if device.type == "cuda" else ON_A_CPU


def require_shapes(names: Sequence[str], device: torch.device) -> None:
    """Refuses shapes that there are not, and those whose weights alone plainly are too large for a CPU's memory. What
    does not fit a GPU is noticed when it is made."""
    shapes = {name: shape_named(name) for name in names}
    room = available_bytes() if device.type == "cpu" else None
    for name, shape in shapes.items():
        need = ITEM * sum(spec.numel for spec in shape.tensors().values())
        if room is not None and need > room:
            raise ValueError(
                f"{name} takes {need / 1e9:.1f} GB on a CPU (float32), and {room / 1e9:.1f} GB of memory are "
                f"available: choose a smaller --shape, or run it on a GPU."
            )


def require_context(names: Sequence[str], prompt: int, new: int) -> None:
    """Refuses sequences longer than a shape's context: the engine would refuse or shorten them, and there would be
    nothing to time."""
    for name in names:
        context = shape_named(name).context
        if prompt + new > context:
            raise ValueError(
                f"A prompt of {prompt} tokens and {new} new ones are {prompt + new}; the context of {name} is "
                f"{context}: ask for fewer."
            )


def available_bytes() -> int | None:
    """Memory that a new process can have, or the limit of its container where that is less; None where the system does
    not say."""
    found = []
    info, limit = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")
    if info.exists():
        found += [1024 * int(line.split()[1]) for line in info.read_text().splitlines() if "MemAvailable" in line]
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        found.append(int(text))
    return min(found, default=None)
