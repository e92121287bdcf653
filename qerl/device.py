"""Which device to compute on."""

import torch


def resolve_device(name: str | torch.device | None) -> torch.device:
    """None or "auto" -> a GPU if there is one; anything that this machine lacks is refused."""
    if name is None or name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{name!r} is not a device; write cpu, cuda, cuda:1 or auto.") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"qerl computes on cpu or cuda, not on {name!r}.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"This machine has no device {name} ({torch.cuda.device_count()} GPUs). Use cpu.")
    return device
