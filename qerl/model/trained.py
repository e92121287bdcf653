"""What is trained is float32; what forwards read is a copy in the compute dtype, refreshed in place after each update.

A bf16 gain of 1 does not move under updates of 1e-5: its neighbours are 4e-3 away. The float32 master does. Both keep
their addresses for life, so that captured graphs stay valid.
"""

from typing import Any

import torch
from torch import Tensor, nn


class _Read(torch.autograd.Function):
    """Gives the copy's values, and passes the gradient on to the master in float32."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, copy: Tensor) -> Tensor:
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(torch.float32), None


class Trained(nn.Module):
    """A trained tensor: `master` float32, and where the compute dtype is another, `copy` in it."""

    copy: Tensor | None

    def __init__(self, value: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.master = nn.Parameter(value.detach().to(torch.float32, copy=True))
        self.copy = None if dtype == torch.float32 else self.master.detach().to(dtype)

    def read(self) -> Tensor:
        """In the compute dtype, attached to the master."""
        if self.copy is None:
            return self.master
        out: Tensor = _Read.apply(self.master, self.copy)  # type: ignore[no-untyped-call]
        return out

    def value(self) -> Tensor:
        """The same without its history."""
        return self.master.detach() if self.copy is None else self.copy

    @torch.no_grad()
    def lie_in(self, place: Tensor) -> None:
        """Keep the copy in a part of a larger tensor."""
        assert self.copy is not None
        place.copy_(self.copy)
        self.copy = place

    @torch.no_grad()
    def write(self, value: Tensor) -> None:
        """Set the value in place, master and copy."""
        if value.shape != self.master.shape:
            raise ValueError(f"A tensor of shape {tuple(value.shape)} does not fit {tuple(self.master.shape)}.")
        self.master.copy_(value)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """After an optimizer step: bring the copy up to date."""
        if self.copy is not None:
            self.copy.copy_(self.master)


@torch.no_grad()
def refresh(model: nn.Module) -> None:
    """Bring every copy of a model up to date, in a few launches; call it after each optimizer step.

    By launches that end before the next one starts: our linears read adapters without waiting for the kernel before.
    """
    found = [module for module in model.modules() if isinstance(module, Trained)]
    pairs = [(module.copy, module.master.detach()) for module in found if module.copy is not None]
    if pairs:
        copies, masters = zip(*pairs, strict=True)
        torch._foreach_copy_(copies, masters)
