"""Safetensors files read and written piece by piece.

The safetensors library maps or holds whole files; a converter that must stay small for any model reads and writes at
offsets instead. The format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}},
then the tensors' bytes one after another.
"""

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT = 8
LARGEST_HEADER = 100 << 20  # the safetensors library's own limit


@dataclass(frozen=True)
class Spec:
    """A tensor's dtype and shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Location:
    """Where a tensor lies: its file, the offset of its first byte, its dtype and shape."""

    path: Path
    offset: int
    spec: Spec


def read_header(path: Path) -> dict[str, Location]:
    """The tensors of a safetensors file in file order. A damaged or cut file is refused by name."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(size - 8, LARGEST_HEADER):
            raise ValueError(f"{path} is not a complete safetensors file ({size} bytes). Download it again.")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        entries = [(name, header[name]) for name in header if name != "__metadata__"]
        entries.sort(key=lambda item: item[1]["data_offsets"][0])
        located = {}
        for name, entry in entries:
            if entry["dtype"] not in DTYPES:
                raise ValueError(f"{path}: {name} has dtype {entry['dtype']}, which qerl does not read.")
            begin, end = entry["data_offsets"]
            spec = Spec(DTYPES[entry["dtype"]], tuple(entry["shape"]))
            if begin < 0 or min(spec.shape, default=0) < 0 or end - begin != spec.nbytes:
                raise ValueError(f"{path} is damaged: {name} has {end - begin} bytes, its shape needs {spec.nbytes}.")
            if 8 + length + end > size:
                raise ValueError(f"{path} is truncated: {name} ends past its {size} bytes. Download it again.")
            located[name] = Location(path, 8 + length + begin, spec)
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} has a damaged safetensors header ({error}). Download it again.") from error
    return located


class Reader:
    """Reads runs of elements from safetensors files; threads may share one. Use as a context manager."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def open(self, path: Path) -> None:
        """Open a file before threads start to read it."""
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY)

    def read(self, where: Location, start: int = 0, count: int | None = None) -> Tensor:
        """`count` elements from element `start` on, flat, in the file's dtype; everything by default."""
        self.open(where.path)
        count = where.spec.numel - start if count is None else count
        dtype = where.spec.dtype
        buffer = np.empty(count * dtype.itemsize, dtype=np.uint8)
        view, offset = buffer.data, where.offset + start * dtype.itemsize
        while view:
            got = os.preadv(self._files[where.path], [view], offset)
            if got == 0:
                raise ValueError(f"{where.path} became shorter while it was read.")
            view, offset = view[got:], offset + got
        return torch.from_numpy(buffer).view(dtype)


class Writer:
    """A safetensors file whose tensors are appended piece by piece, in any order of tensors.

    All specs are known before; space is reserved at once, so a full disk shows here and not halfway. The file lies
    under `path` + ".writing" until `close`, which flushes it and gives it its name.
    """

    def __init__(self, path: Path, specs: dict[str, Spec]) -> None:
        self.path = path
        self._temporary = path.with_name(path.name + ".writing")
        self._specs = specs
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        begin = 0
        self._begin: dict[str, int] = {}
        for name, spec in specs.items():
            header[name] = {
                "dtype": DTYPE_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [begin, begin + spec.nbytes],
            }
            self._begin[name] = begin
            begin += spec.nbytes
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % ALIGNMENT)
        self._data = 8 + len(raw)
        self._written = dict.fromkeys(specs, 0)
        self._fd = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.posix_fallocate(self._fd, 0, self._data + begin)
            os.pwrite(self._fd, struct.pack("<Q", len(raw)) + raw, 0)
        except BaseException:
            self.abandon()
            raise

    def spec(self, name: str) -> Spec:
        return self._specs[name]

    def append(self, name: str, piece: Tensor) -> None:
        """The next elements of tensor `name`. Different tensors may be written by different threads."""
        data = piece.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        at = self._written[name]
        assert at + len(data) <= self._specs[name].nbytes, f"{name} received more data than its shape holds"
        self._written[name] = at + len(data)
        offset = self._data + self._begin[name] + at
        while data:
            done = os.pwrite(self._fd, data, offset)
            data, offset = data[done:], offset + done

    def close(self) -> None:
        """Check that every tensor is whole, flush, and give the file its name."""
        short = [name for name, spec in self._specs.items() if self._written[name] != spec.nbytes]
        assert not short, f"tensors left unfinished: {short[:3]}"
        os.fsync(self._fd)
        self._close()
        os.replace(self._temporary, self.path)

    def abandon(self) -> None:
        """Remove what was written."""
        self._close()
        self._temporary.unlink(missing_ok=True)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
