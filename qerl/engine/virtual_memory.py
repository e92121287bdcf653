"""GPU memory whose address outlives it: unmapped while the trainer needs the space, mapped again at the same place.

torch's allocator has no such thing, so this asks the CUDA driver itself (cuMemAddressReserve, cuMemCreate, cuMemMap).
torch's memory statistics do not count it; `torch.cuda.mem_get_info` does.
"""

import ctypes
import sys
from typing import Any

import torch
from torch import Tensor

SLACK = 0.05  # of a GPU, left to others
PINNED, DEVICE, READ_WRITE, MINIMUM = 1, 1, 3, 0  # names of the driver's enums, shortened


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class VirtualMemory:
    """A range of addresses on a GPU, mapped from the start. Freed with the last tensor that looks at it."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        torch.cuda.synchronize(device)  # the driver's calls work in torch's context
        index = torch.cuda.current_device() if device.index is None else device.index
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._properties = _Properties(PINNED, 0, _Location(DEVICE, index))
        granularity = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), MINIMUM)
        self.nbytes = -(-nbytes // granularity.value) * granularity.value
        self._address = ctypes.c_uint64()
        self._handle = ctypes.c_uint64()
        self.mapped = False
        self._call(
            "cuMemAddressReserve",
            ctypes.byref(self._address),
            ctypes.c_size_t(self.nbytes),
            ctypes.c_size_t(0),
            ctypes.c_uint64(0),
            ctypes.c_ulonglong(0),
        )
        self.map()

    def map(self) -> None:
        """Put memory behind the addresses. Its content is undefined."""
        assert not self.mapped, "memory is mapped already"
        free, total = torch.cuda.mem_get_info(self._properties.location.id)
        if free - self.nbytes < SLACK * total:  # else what torch keeps unused need not be found anew
            torch.cuda.empty_cache()
        size = ctypes.c_size_t(self.nbytes)
        self._call(
            "cuMemCreate", ctypes.byref(self._handle), size, ctypes.byref(self._properties), ctypes.c_ulonglong(0)
        )
        try:
            self._call("cuMemMap", self._address, size, ctypes.c_size_t(0), self._handle, ctypes.c_ulonglong(0))
            access = _Access(self._properties.location, READ_WRITE)
            self._call("cuMemSetAccess", self._address, size, ctypes.byref(access), ctypes.c_size_t(1))
        except RuntimeError:
            self._driver.cuMemUnmap(self._address, size)
            self._driver.cuMemRelease(self._handle)
            raise
        self.mapped = True

    def unmap(self) -> None:
        """Give the memory back and keep the addresses."""
        assert self.mapped, "memory is not mapped"
        torch.cuda.synchronize(self._properties.location.id)
        self._call("cuMemUnmap", self._address, ctypes.c_size_t(self.nbytes))
        self._call("cuMemRelease", self._handle)
        self.mapped = False

    def tensor(self, nbytes: int) -> Tensor:
        """The first bytes as uint8; the tensor keeps this object alive."""
        return torch.as_tensor(_View(self, nbytes), device=f"cuda:{self._properties.location.id}")

    def _call(self, name: str, *args: Any) -> None:
        error = getattr(self._driver, name)(*args)
        if error:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(error, ctypes.byref(text))
            reason = (text.value or b"unknown error").decode()
            raise (
                torch.cuda.OutOfMemoryError(
                    f"The cache's {self.nbytes / 1e9:.2f} GB could not be had ({name}: {reason}); give it fewer blocks."
                )
                if "out of memory" in reason
                else RuntimeError(f"{name}: {reason}")
            )

    def __del__(self) -> None:
        if sys.is_finalizing() or not getattr(self, "_address", None):
            return
        if self.mapped:
            self.unmap()
        if self._address.value:
            self._call("cuMemAddressFree", self._address, ctypes.c_size_t(self.nbytes))


class _View:
    def __init__(self, memory: VirtualMemory, nbytes: int) -> None:
        self.memory = memory
        address = memory._address.value
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
