"""The one model definition: the trainer and the sampler hold the same `Decoder` and differ only in attention.

Forwards run over packed tokens. How a forward attends and whether noise applies are its arguments; the adapter applies
unless it is inside `adapter_disabled()`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qerl.kernels.heads import Heads, turned
from qerl.kernels.logprob import float32_product, logprob
from qerl.kernels.rope import rope_frequencies, rope_tables
from qerl.model.architecture import Architecture
from qerl.model.layers import (
    Attend,
    Block,
    DenseWeight,
    LoraSettings,
    Mode,
    Projection,
    QuantizedWeight,
    RMSNorm,
    Tables,
)
from qerl.model.packing import Packed


class Decoder(nn.Module):
    """A decoder-only language model on 16-bit or 4-bit weights."""

    def __init__(
        self,
        arch: Architecture,
        embedding: DenseWeight,
        blocks: list[Block],
        norm: RMSNorm,
        head: DenseWeight | None,
        dtype: torch.dtype,
        device: torch.device,
        source: str = "",
    ) -> None:
        super().__init__()
        self.arch, self.dtype, self.device = arch, dtype, device
        self.embedding, self.blocks, self.norm = embedding, nn.ModuleList(blocks), norm
        self.untied_head = head
        frequencies, self.rope_factor = rope_frequencies(arch.head_dim, arch.rope, arch.max_positions)
        self.rope_frequencies = frequencies.to(device)
        self.adapter_enabled = True
        self.lora: LoraSettings | None = None  # of the adapter that is attached
        self.noise_version = 0  # counts the draws of noise
        self.source = source  # the folder or hub id that the weights came from

    @property
    def head(self) -> DenseWeight:
        return self.embedding if self.untied_head is None else self.untied_head

    def _apply(self, *args: Any, **kwargs: Any) -> "Decoder":
        raise ValueError(
            "A Decoder stays on the device and in the dtype that it was loaded with; load it anew instead."
        )

    def forward(self, packed: Packed, noise: bool = False, recompute: bool | int = False) -> Tensor:
        """Hidden states after the final norm, [T, D]. recompute: so many blocks, the first (True: all), keep only their
        input for the backward pass and are computed again there."""

        def attend(layer: int, heads: Heads) -> Tensor:
            return packed.attend(*turned(heads), self.arch.windows[layer])

        if not isinstance(packed, Packed):
            raise ValueError("A forward takes packed sequences: model(pack([ids, ...], model.device)).")
        ids_T = packed.ids_T
        if not ids_T.is_cuda and not 0 <= int(ids_T.min()) <= int(ids_T.max()) < self.arch.vocab:
            raise ValueError(f"Token ids must be from 0 to {self.arch.vocab - 1}; is the tokenizer another model's?")
        return self.run(packed.ids_T, packed.positions_T, attend, noise, recompute)

    def run(
        self, ids_T: Tensor, positions_T: Tensor, attend: Attend, noise: bool = False, recompute: bool | int = False
    ) -> Tensor:
        """The same with any attention: ids_T and positions_T int64 -> [T, D]."""
        mode = Mode(self.adapter_enabled, noise)
        x_TD, delta_TD = F.embedding(ids_T, self.embedding.read()), None
        tables = rope_tables(positions_T, self.rope_frequencies, self.rope_factor, self.dtype)
        again = (self.arch.layers if recompute is True else int(recompute)) if torch.is_grad_enabled() else 0
        for i, block in enumerate(self.blocks):
            if i < again:
                whole = partial(self._whole, block, self.noise_version)
                # Nothing in a block draws, so no generator's state is saved.
                x_TD = checkpoint(whole, x_TD, tables, attend, mode, use_reentrant=False, preserve_rng_state=False)
            else:
                x_TD, delta_TD = block(x_TD, delta_TD, tables, attend, mode)
        out: Tensor = self.norm(x_TD, delta_TD, mode)[1]
        return out

    def _whole(
        self, block: nn.Module, version: int, x_TD: Tensor, tables: Tables, attend: Attend, mode: Mode
    ) -> Tensor:
        """A block with its last addition, so that one tensor is kept; run again, it must see its forward's noise."""
        if mode.noise and version != self.noise_version:
            raise ValueError("Noise changed between a forward with recompute and its backward; draw it afterwards.")
        x_TD, delta_TD = block(x_TD, None, tables, attend, mode)
        out: Tensor = x_TD + delta_TD
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, D] -> float32 [N, V]."""
        return float32_product(hidden, self.head.read())

    def logprobs(self, hidden_ND: Tensor, targets_N: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """log p of the targets and entropy, [N] each, without ever holding all logits."""
        return logprob(hidden_ND, self.head.read(), targets_N, temperature)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that a forward may read, with its name: weights, adapter, noise."""
        for name, module in self.named_modules():
            held = {**vars(module), **dict(module.named_parameters(recurse=False))}
            for key, value in held.items():
                yield from _tensors(f"{name}.{key}", value)

    @contextmanager
    def adapter_disabled(self) -> Iterator[None]:
        """Inside, forwards give the reference policy: no LoRA, the norms' original gains."""
        if self.embedding.trained is not None:
            raise ValueError("Full training keeps no reference policy in the model: load the original a second time.")
        before, self.adapter_enabled = self.adapter_enabled, False
        try:
            yield
        finally:
            self.adapter_enabled = before

    def train_in_full(self) -> None:
        """Every weight becomes trained: full-parameter training, on a 16-bit base without LoRA."""
        if self.embedding.trained is not None:
            raise ValueError("The model is trained in full already.")
        if any(isinstance(module, QuantizedWeight) for module in self.modules()):
            raise ValueError("Full training needs a 16-bit base: load with base='bf16'.")
        if any(module.lora for module in self.modules() if isinstance(module, Projection)):
            raise ValueError("Full training and LoRA exclude each other: load the model without an adapter.")
        for module in list(self.modules()):
            if isinstance(module, Projection):
                module.train_in_full()
            elif isinstance(module, RMSNorm):
                module.train_gain()
        self.embedding.train_in_full()
        if self.untied_head is not None:
            self.untied_head.train_in_full()


def _tensors(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    """The tensors in an attribute: itself, in a list, or in a record such as a quantized weight."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from _tensors(f"{name}.{i}", part)
    elif is_dataclass(value) and not isinstance(value, type):
        for key, part in vars(value).items():
            yield from _tensors(f"{name}.{key}", part)
