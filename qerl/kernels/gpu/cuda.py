"""CUDA C++ compiled at first use by NVRTC, which comes with torch, and launched through the driver; and descriptions
of tensors for the copy engine.

What was compiled is kept in the user's cache folder, under a hash of all it depends on. A launch may overlap the end of
the kernel before it (programmatic dependent launch), also inside a captured graph.
"""

import ctypes
import hashlib
import logging
import os
from contextlib import suppress
from ctypes import POINTER, byref, c_char_p, c_int, c_uint, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_...
BFLOAT16, INT64, SWIZZLE_128, PROMOTE_256 = 9, 5, 3, 3  # of CUtensorMap's enumerations
TensorMap = c_uint64 * 16
MOST_RANK = 128  # of LoRA in our kernels
SHARED_SOURCE = Path(__file__).with_name("hopper.cuh")

log = logging.getLogger(__name__)


class _Attribute(ctypes.Structure):
    _fields_ = [("id", c_int), ("pad", c_int), ("value", c_int), ("rest", c_int * 15)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("stream", c_void_p),
        ("attributes", POINTER(_Attribute)), ("count", c_uint),
    ]  # fmt: skip


class Kernel:
    """One function of a compiled source; hopper.cuh and `before` are put before it.

    shared: bytes of shared memory that a launch may ask for.
    """

    def __init__(
        self, source: Path, name: str, defines: dict[str, int], device: torch.device, shared: int, before: str = ""
    ) -> None:
        self.driver = _driver()
        major, minor = torch.cuda.get_device_capability(device)
        architecture = f"sm_{major}{minor}{'a' if major == 9 else ''}"
        binary = _compiled(SHARED_SOURCE.read_text() + before + source.read_text(), source.name, defines, architecture)
        module, self.function = c_void_p(), c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # the context exists
            _check(self.driver.cuModuleLoadData(byref(module), binary))
        _check(self.driver.cuModuleGetFunction(byref(self.function), module, name.encode()))
        _check(self.driver.cuFuncSetAttribute(self.function, MAX_DYNAMIC_SHARED, shared))

    def launch(self, blocks: int, threads: int, shared: int, arguments: ctypes.Structure) -> None:
        """On the current stream; `arguments` is the kernel's one parameter."""
        attribute = _Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
        config = _Config((blocks, 1, 1), (threads, 1, 1), shared, torch.cuda.current_stream().cuda_stream)
        config.attributes, config.count = ctypes.pointer(attribute), 1
        parameters = (c_void_p * 1)(ctypes.addressof(arguments))
        _check(self.driver.cuLaunchKernelEx(byref(config), self.function, parameters, None))


def tensor_map(
    tensor: Tensor, dtype: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int = 0
) -> Any:
    """How the copy engine shall see a tensor: sizes and box from the innermost dimension on, outer strides in bytes.

    What a box has outside of the tensor comes as zeros.
    """
    room = (ctypes.c_char * 192)()
    start = -(-ctypes.addressof(room) // 64) * 64
    rank = len(sizes)
    code = _driver().cuTensorMapEncodeTiled(
        c_void_p(start), dtype, rank, c_void_p(tensor.data_ptr()), (c_uint64 * rank)(*sizes),
        (c_uint64 * (rank - 1))(*strides), (c_uint * rank)(*box), (c_uint * rank)(*[1] * rank),
        0, swizzle, PROMOTE_256, 0,
    )  # fmt: skip
    _check(code)
    return TensorMap.from_buffer_copy(ctypes.string_at(start, 128))


def _check(code: int) -> None:
    if code:
        text = c_char_p()
        _driver().cuGetErrorString(code, byref(text))
        raise RuntimeError(f"CUDA: {(text.value or b'error').decode()} ({code}).")


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@cache
def compiles_for_hopper(device: torch.device) -> bool:
    """Whether the device is a Hopper GPU and there is a compiler: torch's CUDA builds bring one."""
    try:
        _nvrtc()
    except OSError:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def address(tensor: Tensor | None) -> int | None:
    """As a kernel's structure of arguments wants it."""
    return None if tensor is None else tensor.data_ptr()


def _compiled(source: str, name: str, defines: dict[str, int], architecture: str) -> bytes:
    nvrtc = _nvrtc()
    options = [f"--gpu-architecture={architecture}", "--std=c++17", "-lineinfo"]
    options += [f"-D{key}={value}" for key, value in sorted(defines.items())]
    major, minor = c_int(), c_int()
    nvrtc.nvrtcVersion(byref(major), byref(minor))
    words = [source, *options, f"{major.value}.{minor.value}"]
    kept = Path.home() / ".cache" / "qerl" / f"{hashlib.sha256(repr(words).encode()).hexdigest()[:32]}.cubin"
    if kept.is_file():
        return kept.read_bytes()
    program = c_void_p()
    nvrtc.nvrtcCreateProgram(byref(program), source.encode(), name.encode(), 0, None, None)
    code = nvrtc.nvrtcCompileProgram(program, len(options), (c_char_p * len(options))(*(o.encode() for o in options)))
    size = ctypes.c_size_t()
    if code:
        nvrtc.nvrtcGetProgramLogSize(program, byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"{name} does not compile for {architecture}:\n{log.value.decode()}")
    nvrtc.nvrtcGetCUBINSize(program, byref(size))
    binary = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, binary)
    nvrtc.nvrtcDestroyProgram(byref(program))
    keep(binary.raw, kept)
    return binary.raw


def keep(binary: bytes, path: Path) -> None:
    """For the next process, where the disk has room and lets us: else that compiles it again."""
    whole = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole.write_bytes(binary)
        whole.replace(path)
    except OSError as error:
        log.warning("A compiled kernel can't be kept in %s (%s): it is compiled at every start.", path.parent, error)
        with suppress(OSError):
            whole.unlink()


@cache
def _nvrtc() -> Any:
    """The library that torch has loaded or brought along."""
    version = (torch.version.cuda or "13").split(".")[0]
    name = f"libnvrtc.so.{version}"
    try:
        return ctypes.CDLL(name)
    except OSError:
        beside = Path(torch.__file__).parent.parent / "nvidia"
        found = sorted(beside.glob(f"*/lib/{name}"))
        if not found:
            raise
        return ctypes.CDLL(str(found[0]))
