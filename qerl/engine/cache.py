"""The key/value cache as tensors: one run of memory that can be given away and taken back.

Places are numbered block * block_size + offset. One block more than asked for is there: what has nowhere to go (padding
rows, tokens past a sequence's end) is written to it and never read.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from qerl.engine.virtual_memory import VirtualMemory
from qerl.model.decoder import Decoder

CPU_BYTES = 2 << 30  # a cache takes at most this much of a CPU's memory
GPU_SHARE = 0.8  # and this share of what is free on a GPU once the model is loaded


class Cache:
    """keys and values: [layers, places, key/value heads, head size]."""

    def __init__(self, model: Decoder, num_blocks: int, block_size: int) -> None:
        arch = model.arch
        self.num_blocks, self.block_size, self.device = num_blocks, block_size, model.device
        self.dtype = model.dtype
        self.shape = (2, arch.layers, (num_blocks + 1) * block_size, arch.kv_heads, arch.head_dim)
        self.memory: VirtualMemory | None = None
        self.awake = False
        self.wake()

    @property
    def trash(self) -> int:
        """The block for what is never read."""
        return self.num_blocks

    @property
    def nbytes(self) -> int:
        """Awake or not."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def wake(self) -> None:
        """Have memory, zeroed. On a GPU it lies where it lay before, so that captured graphs stay valid."""
        if self.awake:
            return
        if self.device.type == "cuda":
            if self.memory is None:
                self.memory = VirtualMemory(self.nbytes, self.device)
                self.both = self.memory.tensor(self.nbytes).view(self.dtype).view(self.shape)
            else:
                self.memory.map()
            self.both.zero_()
        else:
            self.both = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        self.keys, self.values = self.both[0], self.both[1]
        self.scratch: list[Tensor] = [self.both.new_empty(0), self.both.new_empty(0)]
        self.awake = True

    def sleep(self) -> None:
        """Give the memory back; what was cached is lost."""
        if not self.awake:
            return
        self.scratch = []
        if self.memory is not None:
            self.memory.unmap()
        else:
            self.both = self.keys = self.values = torch.empty(0, dtype=self.dtype)
        self.awake = False

    def copy_block(self, source: int, target: int) -> None:
        at, to, size = source * self.block_size, target * self.block_size, self.block_size
        self.both[:, :, to : to + size].copy_(self.both[:, :, at : at + size])


def block_bytes(model: Decoder, block_size: int) -> int:
    arch = model.arch
    return 2 * arch.layers * block_size * arch.kv_heads * arch.head_dim * model.dtype.itemsize


def blocks_that_fit(model: Decoder, block_size: int, lengths: Iterable[int], reserve: int = 0) -> int:
    """Blocks for sequences of these lengths, as many as memory allows. What is free changes: ask once, and record.

    reserve: bytes that are free on a GPU now and will not be later, such as the optimizer's.
    """
    room = CPU_BYTES
    if model.device.type == "cuda":
        room = int(GPU_SHARE * max(0, torch.cuda.mem_get_info(model.device)[0] - reserve))
    wanted = sum(-(-length // block_size) for length in lengths)
    return max(1, min(wanted, room // block_bytes(model, block_size)))
