"""Stream a 16-bit checkpoint through a 4-bit format, folder to folder.

Worker threads each take one unit (the matrices that share a global scale, or a tensor to copy) and go through it in
small pieces: read at an offset, quantize, write at an offset. A first pass over the unit finds its largest magnitude,
where the format has a global scale; the second pass then reads from the operating system's cache. So memory does not
depend on the model or even on a matrix, and reading, computing and writing overlap across workers.

Nothing half-made is ever called OUT. Shards are written into OUT.partial, each named only when it is whole and flushed;
the folder is renamed at the end. A second run with the same source and settings keeps the finished shards.
"""

import hashlib
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from qerl import __version__
from qerl.errors import Interrupted
from qerl.quant.checkpoint import INDEX, Checkpoint
from qerl.quant.layout import Layout
from qerl.quant.partial import RESUME, claimed, complete, flush_folder, require_space, write_json
from qerl.quant.plan import Plan, Unit
from qerl.quant.report import LayerError, Report
from qerl.quant.safetensors_io import Location, Reader, Spec, Writer

REPORT = "quantize_report.json"
PIECE_CPU = 1 << 18  # elements: large enough that threads seldom wait for Python, small enough for the cache
PIECE_GPU = 1 << 24
MOST_WORKERS = 4  # more of them wait for Python's lock; further cores share the operations
SAMPLE = 1 << 12
KEPT_BY_MALLOC = 30 << 20
# Files that travel with the weights; weights themselves, indexes, code and the model card do not.
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".index.json", ".py", ".md")


class _Stopped(Exception):
    """Ends a worker whose shard has failed elsewhere."""


def convert(
    source: Checkpoint,
    out: Path,
    layout: Layout,
    plan: Plan,
    method: str = "rtn",
    device: str = "cpu",
    on_bytes: Callable[[int], None] = lambda n: None,
    say: Callable[[str], None] = lambda message: None,
) -> Report:
    """Write `source` in `layout` to the new folder `out` and report what it cost.

    on_bytes is told the size of every piece of the source that is done (and at once of shards found finished), from
    several threads; say gets a line when something noteworthy happens.
    """
    started = time.monotonic()
    with claimed(out, fingerprint(source, layout, plan, method), say) as partial:
        for path in partial.rglob("*.writing"):
            path.unlink()
        finished = [i for i in range(len(plan.shards)) if _is_finished(partial / plan.shard_name(i))]
        if finished:
            say(f"Resuming: {len(finished)} of {len(plan.shards)} shards are finished in {partial}.")
        require_space(partial, sum(plan.shard_nbytes(i) for i in range(len(plan.shards)) if i not in finished))
        work = _Work(source, layout, method, plan.dtype, torch.device(device), on_bytes)
        try:
            for i, units in enumerate(plan.shards):
                if i in finished:
                    on_bytes(sum(_source_nbytes(source, unit) for unit in units))
                else:
                    work.write_shard(partial / plan.shard_name(i), units)
            report = _finish(source, partial, layout, plan, method, time.monotonic() - started)
            complete(partial, out)
        except (KeyboardInterrupt, OSError) as error:
            done = sum(_is_finished(partial / plan.shard_name(i)) for i in range(len(plan.shards)))
            reason = f"stopped by an error ({error})" if isinstance(error, OSError) else "interrupted"
            kept = f"{done} of {len(plan.shards)} shards are finished and kept in {partial}"
            raise Interrupted(
                f"Quantizing was {reason}. {out} was not made; {kept if done else 'no shard was finished'}. "
                f"Run the same command again to {'go on, or delete that folder' if done else 'start over'}."
            ) from error
    return report


class _Work:
    """Carries out units: the state that all workers share."""

    def __init__(
        self,
        source: Checkpoint,
        layout: Layout,
        method: str,
        dtype: torch.dtype,
        device: torch.device,
        on_bytes: Callable[[int], None],
    ) -> None:
        self.source, self.layout, self.method, self.dtype = source, layout, method, dtype
        self.device, self.on_bytes = device, on_bytes
        cores = len(os.sched_getaffinity(0))
        self.workers = min(cores, MOST_WORKERS)
        self.threads = cores // self.workers if device.type == "cpu" else 1
        self.piece = PIECE_CPU * self.threads if device.type == "cpu" else PIECE_GPU
        self.stop = threading.Event()
        # glibc returns freed pieces to the system at once, and each new one would fault its pages in again, until it
        # has seen a larger allocation come and go: then it keeps up to twice that size.
        torch.empty(KEPT_BY_MALLOC, dtype=torch.uint8)

    def write_shard(self, path: Path, units: tuple[Unit, ...]) -> None:
        """All units of one shard, then its error sums, then its name: a named shard is complete."""
        specs = {name: spec for unit in units for name, spec in unit.outputs.items()}
        writer = Writer(path, specs)
        errors: list[LayerError] = []
        try:
            with Reader() as reader, _threads_an_operation(self.threads):
                for where in self.source.tensors.values():
                    reader.open(where.path)
                pool = ThreadPoolExecutor(max_workers=self.workers)
                try:
                    jobs = [pool.submit(self.run, unit, reader, writer) for unit in units]
                    wait(jobs, return_when=FIRST_EXCEPTION)
                    failure = next((job.exception() for job in jobs if job.done() and job.exception()), None)
                    if failure:
                        raise failure
                    errors = [error for job in jobs for error in job.result()]
                finally:
                    self.stop.set()
                    pool.shutdown(cancel_futures=True)
                    self.stop.clear()
            write_json(_errors_path(path), [asdict(error) for error in errors])
            writer.close()
        except BaseException:
            writer.abandon()
            raise
        flush_folder(path.parent)

    def run(self, unit: Unit, reader: Reader, writer: Writer) -> list[LayerError]:
        if not unit.modules:
            self.copy(unit.copied, reader, writer)
            return []
        wheres = [self.source.tensors[f"{module}.weight"] for module in unit.modules]
        amax = None
        if self.layout.shares_global_scale:
            amax = torch.stack(
                [
                    self.amax(where, f"{module}.weight", reader)
                    for module, where in zip(unit.modules, wheres, strict=True)
                ]
            ).amax()
        return [self.encode(m, w, amax, reader, writer) for m, w in zip(unit.modules, wheres, strict=True)]

    def encode(self, module: str, where: Location, amax: Tensor | None, reader: Reader, writer: Writer) -> LayerError:
        name = f"{module}.weight"
        encoder = self.layout.encoder(Spec(self.dtype, where.spec.shape), self.method, amax, name)
        error = norm = 0.0
        for piece_E in self.pieces(where, reader):
            weight_E = piece_E.to(torch.float32)
            tensors, back_E = encoder.add(weight_E)
            for suffix, tensor in tensors.items():
                writer.append(module + suffix, tensor)
            norm += float(torch.dot(weight_E, weight_E))
            difference_E = back_E.sub_(weight_E)
            error += float(torch.dot(difference_E, difference_E))
            self.on_bytes(piece_E.nbytes)
        for suffix, tensor in encoder.finish().items():
            writer.append(module + suffix, tensor)
        stored = sum(spec.nbytes for spec in self.layout.specs(where.spec).values())
        measured = math.isfinite(error) and 0 < norm < math.inf  # else the sums left float32's range
        return LayerError(module, where.spec.numel, stored, error if measured else None, norm if measured else 0.0)

    def amax(self, where: Location, name: str, reader: Reader) -> Tensor:
        ends = [torch.stack(torch.aminmax(piece_E)) for piece_E in self.pieces(where, reader)]
        largest = torch.stack(ends).abs().amax().to(torch.float32)
        if not bool(torch.isfinite(largest)):
            raise ValueError(not_finite(name))
        return largest

    def copy(self, name: str, reader: Reader, writer: Writer) -> None:
        where = self.source.tensors[name]
        kept = writer.spec(name).dtype
        for piece_E in self.pieces(where, reader):
            kept_E = piece_E.to(kept)
            if kept_E.is_floating_point() and not _all_finite(kept_E):
                raise ValueError(not_finite(name))
            writer.append(name, kept_E)
            self.on_bytes(piece_E.nbytes)

    def pieces(self, where: Location, reader: Reader) -> Iterator[Tensor]:
        for start in range(0, where.spec.numel, self.piece):
            if self.stop.is_set():
                raise _Stopped
            yield reader.read(where, start, min(self.piece, where.spec.numel - start)).to(self.device)


def _all_finite(piece_E: Tensor) -> bool:
    """A finite sum has finite terms; only a sum that is not (large terms can do that) needs the slower, exact look."""
    return math.isfinite(piece_E.sum(dtype=torch.float32)) or bool(torch.isfinite(piece_E).all())


def not_finite(name: str) -> str:
    return f"{name} holds NaN or Inf; such a weight can't be quantized. Check or re-download the model."


def _source_nbytes(source: Checkpoint, unit: Unit) -> int:
    names = [f"{module}.weight" for module in unit.modules] or [unit.copied]
    return sum(source.tensors[name].spec.nbytes for name in names)


@contextmanager
def _threads_an_operation(n: int) -> Iterator[None]:
    """Workers times threads fill the cores; torch's setting is put back at the end."""
    threads = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def fingerprint(source: Checkpoint, layout: Layout, plan: Plan, method: str) -> str:
    """Changes whenever a finished shard could not be reused: with the source's files, the settings, or qerl."""
    identity = hashlib.sha256()
    for path in sorted({where.path for where in source.tensors.values()}):
        stat = path.stat()
        identity.update(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode())
        with open(path, "rb") as file:  # header, and samples of the data: copies may share name, size and time
            for at in range(0, stat.st_size, max(SAMPLE, stat.st_size // 64)):
                file.seek(at)
                identity.update(file.read(SAMPLE))
    outputs = [[{name: str(spec) for name, spec in unit.outputs.items()} for unit in units] for units in plan.shards]
    identity.update(json.dumps([__version__, layout.format, method, str(plan.dtype), outputs]).encode())
    return identity.hexdigest()


def _finish(source: Checkpoint, partial: Path, layout: Layout, plan: Plan, method: str, seconds: float) -> Report:
    """Everything but the shards: index, config, tokenizer and generation files, report."""
    shards = [partial / plan.shard_name(i) for i in range(len(plan.shards))]
    layers = [LayerError(**entry) for shard in shards for entry in json.loads(_errors_path(shard).read_text())]
    total = sum(plan.shard_nbytes(i) for i in range(len(shards)))
    report = Report(
        str(source.folder), layout.format, method, source.nbytes, total, tuple(layers), plan.ignored, seconds
    )
    weight_map = {
        name: shard.name for shard, units in zip(shards, plan.shards, strict=True) for u in units for name in u.outputs
    }
    write_json(partial / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    config = {key: value for key, value in source.config.items() if key != "torch_dtype"}
    config["dtype"] = str(plan.dtype).removeprefix("torch.")
    config["quantization_config"] = layout.config(list(plan.ignored), plan.dtype)
    write_json(partial / "config.json", config)
    copy_companions(source.folder, partial)
    write_json(partial / REPORT, report.to_json())
    return report


def copy_companions(source: Path, target: Path) -> None:
    """Tokenizer, generation settings, chat templates, licence: all that is neither weights nor code nor model card."""
    for path in sorted(source.iterdir()):
        name = path.name
        if path.is_file() and name != "config.json" and not name.startswith(".") and not name.endswith(NOT_COPIED):
            shutil.copyfile(path, target / name)
        elif path.is_dir() and name == "additional_chat_templates":
            shutil.copytree(path, target / name, dirs_exist_ok=True)


def _errors_path(shard: Path) -> Path:
    return shard.parent / RESUME / f"{shard.name}.errors.json"


def _is_finished(shard: Path) -> bool:
    """A shard has its name only when it is whole, and its error sums are written before."""
    return shard.exists() and _errors_path(shard).exists()
