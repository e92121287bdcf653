"""A folder that appears whole or not at all: it is made as NAME.partial and renamed at the end.

The partial folder is locked against a second process. Its `.resume` folder says what it was begun with and holds what a
second run needs; other work, or leftovers of none, never get into the result.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RESUME = ".resume"
DISK_MARGIN = 64 << 20


def partial_folder(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


def require_new(out: Path) -> None:
    if os.path.lexists(out):
        raise ValueError(f"{out} exists. Name a new folder, or remove it first.")


@contextmanager
def claimed(out: Path, identity: str, say: Callable[[str], None]) -> Iterator[Path]:
    """The partial folder of `out`, locked; emptied if it was begun with another identity, and removed if the work fails
    before anything in it is finished."""
    require_new(out)
    partial = partial_folder(out)
    mark = partial / RESUME / "identity"
    if partial.exists() and not mark.exists() and any(path.name != RESUME for path in partial.iterdir()):
        raise ValueError(f"{partial} is not a folder that qerl began. Move it away, or name another OUT.")
    with writable(partial):
        (partial / RESUME).mkdir(parents=True, exist_ok=True)
    with locked(partial, f"Another process is writing {partial}. Wait for it, or name another OUT."):
        try:
            require_new(out)  # it may have been finished by another process just now
            if not mark.exists() or mark.read_text() != identity:
                if mark.exists():
                    say(f"{partial} was begun from another source or with other settings: starting over.")
                for path in partial.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                with writable(partial):
                    (partial / RESUME).mkdir()
                    write_text(mark, identity)
            yield partial
        except BaseException:
            if partial.exists() and all(path.name in (RESUME, mark.name) for path in partial.rglob("*")):
                shutil.rmtree(partial)
            raise


@contextmanager
def locked(folder: Path, refusal: str) -> Iterator[None]:
    """Inside, no other process holds the folder; one that comes second is told the refusal."""
    with writable(folder):
        lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(refusal) from error
        yield
    finally:
        os.close(lock)


@contextmanager
def writable(path: Path, remedy: str = "name a folder that you can write") -> Iterator[None]:
    """Turns the system's refusal to write into a message."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"Can't write {path}: {error.strerror}. Free space, or {remedy}.") from error


def complete(partial: Path, out: Path) -> None:
    """Everything is written: flush it and give it its name."""
    for path in partial.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    flush_folder(partial)
    os.replace(partial, out)
    shutil.rmtree(out / RESUME)
    flush_folder(out.parent)


def require_space(partial: Path, needed: int) -> None:
    free = shutil.disk_usage(partial).free
    if free < needed + DISK_MARGIN:
        raise ValueError(
            f"{partial.parent} has {free / 1e6:.0f} MB free; the result needs {needed / 1e6:.0f} MB and "
            f"{DISK_MARGIN / 1e6:.0f} MB of air. Free some space, or let `qerl quantize` write an OUT on another disk."
        )


def write_text(path: Path, text: str) -> None:
    """Written and flushed, whole or not at all."""
    temporary = path.with_name(path.name + ".writing")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, allow_nan=False))


def flush_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
