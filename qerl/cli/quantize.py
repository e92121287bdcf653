"""`qerl quantize`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal
from rich.table import Table

from qerl.cli.words import Overrides, Recipe
from qerl.console import byte_progress, finish, say, screen
from qerl.recipe import load_config


def quantize(
    model: Annotated[str, typer.Argument(help="Checkpoint folder or hub id of a 16-bit model.")],
    out: Annotated[Path, typer.Argument(help="Folder to make; it must not exist.")],
    overrides: Overrides = None,
    recipe: Recipe = None,
    format: Annotated[str | None, typer.Option(help="nvfp4, mxfp4 or nf4.", show_default="nvfp4")] = None,
    method: Annotated[str | None, typer.Option(help="rtn, mse, awq or gptq.", show_default="mse")] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="Leave these linear layers in 16 bits; may repeat.")] = None,
    double_quant: Annotated[bool, typer.Option("--double-quant", help="nf4: store absmax in 8 bits.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, or auto.", show_default="auto")] = None,
    calibration: Annotated[Path | None, typer.Option(help="Text for awq and gptq (JSONL or plain).")] = None,
) -> None:
    """Turn a 16-bit checkpoint into a 4-bit one.

    Streams: memory does not grow with the model. Interrupted, it leaves no half-made OUT, and the same command goes on
    where it stopped. `qerl config` lists all settings (quantize.*).
    """
    from qerl import quantize as tool

    words = [f"quantize.ignore={json.dumps(ignore)}"] if ignore else []
    flags = {"format": format, "method": method, "device": device, "calibration.file": calibration}
    words += [f"quantize.{key}={json.dumps(str(value))}" for key, value in flags.items() if value is not None]
    words += ["quantize.double_quant=true"] if double_quant else []
    config = load_config(recipe, [*(overrides or []), *words]).quantize
    if config.method in ("awq", "gptq"):  # llm-compressor shows progress of its own
        report = tool.quantize(model, out, config, say=say)
    else:
        with byte_progress(f"quantizing to {config.format}") as (on_plan, on_bytes):
            report = tool.quantize(model, out, config, on_plan, on_bytes, say)
    _show_report(report)
    finish(report.summary() | {"out": out})


def _show_report(report: Any) -> None:
    def percent(error: float | None) -> str:
        return "-" if error is None else f"{100 * error:.2f} %"

    table = Table(title=f"{report.format}, method {report.method}: relative error by layer kind")
    for column, justify in (("kind", "left"), ("layers", "right"), ("weights", "right"), ("error", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for kind, row in report.by_kind().items():
        table.add_row(kind, str(row["layers"]), f"{row['weights']:,}", percent(row["relative_error"]))
    screen.print(table)
    if report.worst():
        worst = Table("layer", "error", title="The worst layers")
        for module, error in report.worst():
            worst.add_row(module, percent(error))
        screen.print(worst)
    before, after = report.bytes_before, report.bytes_after
    screen.print(
        f"{decimal(before)} -> {decimal(after)} ({after / before:.0%}), {report.bits_per_weight:.2f} bits a weight, "
        f"{report.seconds:.1f} s; 16-bit linear layers: {', '.join(report.ignored) or 'none'}",
        highlight=False,
    )
