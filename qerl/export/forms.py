"""The forms of an export: each appears whole or not at all, and is checked before it gets its name."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from qerl.export.check import Difference, compare_export, probe
from qerl.export.plain import write_plain
from qerl.export.trained import TrainedModel
from qerl.export.values import FullValues, MergedValues, weight_shapes
from qerl.export.vllm import serve_command, write_base, write_pure_lora
from qerl.model.adapter import CONFIG as ADAPTER_CONFIG
from qerl.model.adapter import WEIGHTS as ADAPTER_WEIGHTS
from qerl.model.adapter import read_settings
from qerl.model.loader import DTYPES, architecture_in, weights_folder
from qerl.quant.checkpoint import Checkpoint, read_config, resolve
from qerl.quant.convert import REPORT as QUANTIZE_REPORT
from qerl.quant.convert import convert
from qerl.quant.layout import dequantize, layout_for
from qerl.quant.partial import RESUME, claimed, complete, write_json
from qerl.quant.plan import make_plan

REPORT = "export_report.json"
# Relative difference of logits beyond which an export is not the model that was trained. Rounding every weight to bf16
# moves them by about a hundredth; in float32 only the order of sums differs.
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}

NOTED = 0.1  # an error, as a share of what training changed, that the user is told of


@dataclass(frozen=True)
class Watch:
    """Who is told what goes on: a line, the bytes to write, each piece written."""

    say: Callable[[str], None] = lambda message: None
    on_plan: Callable[[int], None] = lambda total: None
    on_bytes: Callable[[int], None] = lambda count: None


@dataclass(frozen=True)
class Exported:
    out: Path
    form: str
    difference: Difference | None  # None: not checked, or a copy
    notes: tuple[str, ...] = ()  # what the user must know
    delta_kept: float | None = None  # nvfp4: of LoRA's change of the weights, the part along it that is left
    delta_error: float | None = None  # and the size of the error, over that of the change

    def summary(self) -> dict[str, Any]:
        return asdict(self) | {"out": str(self.out), "notes": list(self.notes)}


def export_adapter(trained: TrainedModel, out: Path, watch: Watch) -> Exported:
    """PEFT's folder, byte for byte as it was saved."""
    adapter = _adapter(trained)
    notes = []
    if trained.base not in ("bf16", "full"):
        notes.append(
            f"It was trained on {trained.model} in {trained.base}: put it on the dequantized base (a merged export is "
            "that), or on the 16-bit one, which is slightly another model."
        )
    if read_settings(adapter).train_norms:
        notes.append("It holds trained norms (modules_to_save), which vLLM refuses; for vLLM export with --for vllm.")
    with _new_folder(out, watch) as partial:
        for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            shutil.copyfile(adapter / name, partial / name)
    return Exported(out, "adapter", None, tuple(notes))


def export_merged(
    trained: TrainedModel, out: Path, dtype: str, device: str | None, check: bool, watch: Watch
) -> Exported:
    """A plain checkpoint: the dequantized base with LoRA merged and trained norms, or the weights of full training."""
    before = probe(trained, device) if check else None
    with _new_folder(out, watch) as partial:
        _write_merged(trained, partial, DTYPES[dtype], watch)
        found = compare_export(before, partial, "bf16", None, device) if before else None
        if found is not None:
            _require_close(found, DTYPES[dtype], out)
        made = Exported(out, "merged", found, _rounding_note(found, "--dtype float32 keeps it."))
        write_json(partial / REPORT, made.summary())
    return made


def export_for_vllm(trained: TrainedModel, out: Path, device: str | None, check: bool, watch: Watch) -> Exported:
    """`adapter`, LoRA alone, and `base`: with the trained norms, or a 4-bit base that exists in the cache only."""
    adapter = _adapter(trained)
    source = weights_folder(trained.model, trained.base)
    needs_base = read_settings(adapter).train_norms or source != resolve(trained.model)
    before = probe(trained, device) if check and needs_base else None
    out = out.absolute()
    base_name = str(out / "base") if needs_base else trained.model
    with _new_folder(out, watch) as partial:
        write_pure_lora(adapter, partial / "adapter", base_name)
        if needs_base:
            write_base(source, adapter, partial / "base")
        found = None
        if before is not None:
            found = compare_export(before, partial / "base", trained.base, partial / "adapter", device)
            _require_close(found, torch.bfloat16, out)
        serve = serve_command(base_name, out / "adapter", read_settings(adapter).r)
        told = _rounding_note(found, "A merged export in float32 keeps it.")
        made = Exported(out, "vllm", found, (serve, *told))
        write_json(partial / REPORT, made.summary())
    return made


def export_nvfp4(trained: TrainedModel, out: Path, device: str | None, watch: Watch) -> Exported:
    """Merged and rounded to NVFP4 again. Rounding swallows most of a small change: what is left is measured."""
    before = probe(trained, device)
    with _new_folder(out, watch) as partial:
        merged, rounded = partial / RESUME / "merged", partial / RESUME / "rounded"
        merged.mkdir()
        _write_merged(trained, merged, torch.bfloat16, watch)
        layout = layout_for("nvfp4")
        with Checkpoint(merged) as source:
            plan = make_plan(source, layout, (), int(2e9))
            convert(source, rounded, layout, plan, "mse", "cpu")
        kept, error = _delta(trained, merged, rounded) if trained.adapter is not None else (None, None)
        found = compare_export(before, rounded, "nvfp4", None, device)
        (rounded / QUANTIZE_REPORT).unlink()  # it speaks of the merged weights, which do not stay
        for path in rounded.iterdir():
            shutil.move(path, partial / path.name)
        made = Exported(out, "nvfp4", found, (_warning(found, kept),), kept, error)
        write_json(partial / REPORT, made.summary())
    return made


def _adapter(trained: TrainedModel) -> Path:
    if trained.adapter is None:
        raise ValueError(f"{trained.origin} was trained in full: there is no adapter. Export it with --form merged.")
    return trained.adapter


def _write_merged(trained: TrainedModel, folder: Path, dtype: torch.dtype, watch: Watch) -> None:
    base = weights_folder(trained.model, "bf16" if trained.base == "full" else trained.base)
    arch = architecture_in(base)
    config, shapes = read_config(base), weight_shapes(arch)
    if trained.adapter is not None:
        with Checkpoint(base) as source:
            values = MergedValues(source, trained.adapter, dtype)
            write_plain(folder, base, config, shapes, values, dtype, watch.on_plan, watch.on_bytes)
    else:
        assert trained.weights is not None
        with FullValues(trained.weights, arch) as full:
            write_plain(folder, base, config, shapes, full, dtype, watch.on_plan, watch.on_bytes)


def _delta(trained: TrainedModel, merged: Path, rounded: Path) -> tuple[float, float]:
    """Over all quantized matrices, with D = merged - base and E = rounded - base: <D, E> / <D, D>, |E - D| / |D|."""
    assert trained.adapter is not None
    along = size = error = 0.0
    base_folder = weights_folder(trained.model, trained.base)
    with Checkpoint(base_folder) as base, Checkpoint(merged) as whole, Checkpoint(rounded) as coarse:
        values = MergedValues(base, trained.adapter, torch.bfloat16)
        for module in coarse.quantized_modules:
            before_NK = values.base_value(f"{module}.weight")
            change_NK = whole.read(f"{module}.weight").to(torch.float32) - before_NK
            left_NK = dequantize(coarse.read_quantized(module)) - before_NK
            along += float((change_NK * left_NK).sum())
            size += float(change_NK.square().sum())
            error += float((left_NK - change_NK).square().sum())
    return (along / size, (error / size) ** 0.5) if size else (1.0, 0.0)


def _warning(found: Difference, kept: float | None) -> str:
    lost = "" if found.lost is None else f", an error of {found.lost:.0%} of what training changed"
    along = "" if kept is None else f" Of LoRA's change of the weights {kept:.0%} is left along its direction."
    return (
        f"Rounding to NVFP4 again costs {found.kl:.2g} nats a token (training moved {found.effect_kl:.2g}){lost}; the "
        f"likeliest token is the same in {found.same_token:.1%} of places.{along} The adapter on its own base loses "
        "nothing."
    )


def _rounding_note(found: Difference | None, remedy: str) -> tuple[str, ...]:
    """Changes as small as the steps between 16-bit numbers are lost when they are rounded to such."""
    if found is None or found.lost is None or found.lost < NOTED:
        return ()
    return (f"Rounding to 16 bits makes an error of {found.lost:.0%} of what training changed. {remedy}",)


def _require_close(found: Difference, dtype: torch.dtype, out: Path) -> None:
    if found.relative > LIMITS[dtype]:
        raise ValueError(
            f"The export is not the model that was trained: logits differ by {found.relative:.2g} of their size "
            f"(at most {LIMITS[dtype]:g} is rounding). {out} was not made. Try --dtype float32; if it stays, report it."
        )


@contextmanager
def _new_folder(out: Path, watch: Watch) -> Iterator[Path]:
    """The folder that becomes `out` at the end. Nothing of an earlier or failed try stays."""
    with claimed(out, "export", watch.say) as partial:
        _empty(partial)
        try:
            yield partial
        except BaseException:
            _empty(partial)
            raise
        complete(partial, out)


def _empty(partial: Path) -> None:
    for path in [*partial.iterdir(), *(partial / RESUME).iterdir()]:
        if path.is_dir() and path.name != RESUME:
            shutil.rmtree(path)
        elif path.is_file() and path.name != "identity":
            path.unlink()
