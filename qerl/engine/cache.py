"""The key/value cache as tensors: one run of memory that can be given away and taken back.

Places are numbered block * block_size + offset. One block more than asked for is there: what has nowhere to go (padding
rows, tokens past a sequence's end) is written to it and never read.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from qerl.engine.virtual_memory import VirtualMemory
from qerl.engine.workspace import cache_room, decode_bytes, prefill_bytes
from qerl.kernels.fp8_cache import SCALE_BYTES, from_fp8
from qerl.model.decoder import Decoder
from qerl.model.layers import QuantizedWeight

CPU_BYTES = 2 << 30  # a cache takes at most this much of a CPU's memory
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")  # auto: the model's own; the others are one thing, as in vLLM
ALIGNMENT = 256  # bytes


class Cache:
    """keys and values: [layers, places, key/value heads, head size]; in FP8 scales float32 [layers, 2, places, heads]
    as well, of keys and values."""

    def __init__(self, model: Decoder, num_blocks: int, block_size: int, kv_cache_dtype: str = "auto") -> None:
        arch = model.arch
        self.num_blocks, self.block_size, self.device = num_blocks, block_size, model.device
        self.compute_dtype = model.dtype
        self.fp8 = is_fp8(kv_cache_dtype)
        if self.fp8 and self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) < (8, 9):
            raise ValueError("An FP8 cache needs an Ada, Hopper or newer GPU: leave kv_cache_dtype at auto here.")
        self.dtype = torch.float8_e4m3fn if self.fp8 else model.dtype
        self.shape = (2, arch.layers, (num_blocks + 1) * block_size, arch.kv_heads, arch.head_dim)
        self.both: Tensor
        self.scales: Tensor | None = None
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
        return sum(self._nbytes())

    def wake(self) -> None:
        """Have memory, zeroed. On a GPU it lies where it lay before, so that captured graphs stay valid."""
        if self.awake:
            return
        if self.device.type == "cuda":
            if self.memory is None:
                self.memory = VirtualMemory(self.nbytes, self.device)
                self._view(self.memory.tensor(self.nbytes))
            else:
                self.memory.map()
            self.clear()
        else:
            self._view(torch.zeros(self.nbytes, dtype=torch.uint8))
        self.keys, self.values = self.both[0], self.both[1]
        kind = torch.uint8 if self.fp8 else self.dtype
        self.scratch = [torch.empty(0, dtype=kind, device=self.device) for _ in range(2)]
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
            self.scales = None
        self.awake = False

    def clear(self) -> None:
        self.both.view(torch.uint8).zero_()
        if self.scales is not None:
            self.scales.zero_()

    def layer(self, layer: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values [P, G, d], and in FP8 their scales [2, P, G]."""
        return self.keys[layer], self.values[layer], None if self.scales is None else self.scales[layer]

    def read(self, layer: int, places_K: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of these places in the compute dtype, [K, G, d] each."""
        keys, values, scales = self.layer(layer)
        if scales is None:
            return keys[places_K], values[places_K]
        k, v = (codes.view(torch.uint8)[places_K].view(self.dtype) for codes in (keys, values))
        k_scales, v_scales = scales[:, places_K]
        return from_fp8(k, k_scales, self.compute_dtype), from_fp8(v, v_scales, self.compute_dtype)

    def copy_block(self, source: int, target: int) -> None:
        at, to, size = source * self.block_size, target * self.block_size, self.block_size
        for held in (self.both,) if self.scales is None else (self.both, self.scales):
            held[:, :, to : to + size].copy_(held[:, :, at : at + size])

    def _nbytes(self) -> tuple[int, int]:
        """Of keys and values, up to where scales may begin, and of scales."""
        codes, count = self.dtype.itemsize * torch.Size(self.shape).numel(), torch.Size(self.shape[:-1]).numel()
        return -(-codes // ALIGNMENT) * ALIGNMENT, SCALE_BYTES * count if self.fp8 else 0

    def _view(self, memory: Tensor) -> None:
        """The bytes as what they hold."""
        nbytes = self.dtype.itemsize * torch.Size(self.shape).numel()
        self.both = memory[:nbytes].view(self.dtype).view(self.shape)
        if self.fp8:
            _, layers, places, heads, _ = self.shape
            self.scales = memory[self._nbytes()[0] :].view(torch.float32).view(layers, 2, places, heads)


def is_fp8(kv_cache_dtype: str) -> bool:
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ValueError(f"There is no kv_cache_dtype {kv_cache_dtype!r}; choose one of {', '.join(KV_CACHE_DTYPES)}.")
    return kv_cache_dtype != "auto"


def head_bytes(head_dim: int, item: int, kv_cache_dtype: str) -> int:
    """Of a token's key, or value, of one head; item: bytes of the compute dtype."""
    return head_dim + SCALE_BYTES if is_fp8(kv_cache_dtype) else head_dim * item


def block_bytes(model: Decoder, block_size: int, kv_cache_dtype: str = "auto") -> int:
    arch = model.arch
    head = head_bytes(arch.head_dim, model.dtype.itemsize, kv_cache_dtype)
    return 2 * arch.layers * block_size * arch.kv_heads * head


def blocks_that_fit(
    model: Decoder,
    block_size: int,
    lengths: Iterable[int],
    reserve: int = 0,
    kv_cache_dtype: str = "auto",
    penalty: bool = False,
) -> int:
    """Blocks for sequences of these lengths, as many as memory allows. What is free changes: ask once, and record.

    reserve: bytes that are free on a GPU now and will not be later, such as the optimizer's. penalty: on
    repetition, in drawing: it takes more memory beside the cache.
    """
    size, lengths = block_bytes(model, block_size, kv_cache_dtype), list(lengths)
    blocks = [-(-length // block_size) for length in lengths]
    room = CPU_BYTES
    if model.device.type == "cuda":
        free, held = torch.cuda.mem_get_info(model.device)[0], torch.cuda.memory_allocated(model.device)
        beside = room_beside(model, sum(lengths), len(lengths), penalty)
        room = cache_room(max(0, free - reserve), held + reserve, beside, max(blocks, default=0) * size)
    return max(1, min(sum(blocks), room // size))


def room_beside(model: Decoder, tokens: int, sequences: int, penalty: bool) -> int:
    """What prefill and decoding of so many will take beside the cache."""
    item, quantized = model.dtype.itemsize, any(isinstance(one, QuantizedWeight) for one in model.modules())
    return prefill_bytes(model.arch, tokens, item, quantized) + decode_bytes(model.arch, sequences, item, penalty)
