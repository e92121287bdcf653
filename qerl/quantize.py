"""`qerl quantize` as a function: a 16-bit checkpoint in, a 4-bit one out, by the road that the method asks for."""

from collections.abc import Callable
from pathlib import Path

from qerl.config import QuantizeConfig
from qerl.device import resolve_device
from qerl.quant import calibrate
from qerl.quant.checkpoint import Checkpoint, resolve
from qerl.quant.convert import convert
from qerl.quant.layout import layout_for
from qerl.quant.partial import require_new
from qerl.quant.plan import make_plan, skeleton
from qerl.quant.report import Report


def quantize(
    model: str,
    out: Path,
    settings: QuantizeConfig,
    on_plan: Callable[[int], None] = lambda total: None,
    on_bytes: Callable[[int], None] = lambda n: None,
    say: Callable[[str], None] = lambda message: None,
) -> Report:
    """model: a local folder or a hub id; out: a folder to be made.

    on_plan learns the source's bytes once everything is checked, on_bytes each finished piece, say a line now and then.
    """
    out = out.expanduser().absolute()
    require_new(out)
    device = str(resolve_device(settings.device))
    calibrated = settings.method in ("awq", "gptq")
    if calibrated:
        calibrate.require(settings.method, device, settings.calibration.file)
    with Checkpoint(resolve(model, check=skeleton)) as source:
        layout = layout_for(settings.format, settings.double_quant)
        plan = make_plan(source, layout, settings.ignore, int(settings.max_shard_size * 1e9))
        on_plan(source.nbytes)
        if calibrated:
            asked = settings.calibration
            assert asked.file is not None, "checked by the config"
            text = calibrate.CalibrationText(asked.file, asked.num_samples, asked.max_seq_length)
            shard_gb = settings.max_shard_size
            return calibrate.calibrate(source, out, layout, plan, settings.method, device, text, shard_gb, say)
        return convert(source, out, layout, plan, settings.method, device, on_bytes, say)
