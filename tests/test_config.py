"""The settings themselves: all explained, all read, consistent."""

import re
from pathlib import Path

import pytest

from qerl.config import Config, ConfigError
from qerl.recipe import build_config, load_config, settings
from qerl.trl_names import trl_hint


def test_combinations_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="double_quant belongs to nf4"):
        load_config(None, ["quantize.double_quant=true"])
    with pytest.raises(ConfigError, match=r"calibration\.file is for awq and gptq"):
        load_config(None, ["quantize.calibration.file=x.txt"])
    with pytest.raises(ConfigError, match="knows nvfp4 and mxfp4, not nf4"):
        load_config(None, ["quantize.method=awq", "quantize.format=nf4", "quantize.calibration.file=x.txt"])


def test_every_setting_has_help_and_settings_are_frozen() -> None:
    for entry in settings(Config()):
        assert entry.help.endswith("."), entry.key
        assert entry.unit, entry.key
    with pytest.raises(ValueError, match="frozen"):
        Config().quantize.format = "nf4"  # type: ignore[misc]


def test_every_setting_is_read_somewhere() -> None:
    package = Path(__file__).parent.parent / "qerl"
    code = "\n".join(path.read_text() for path in package.rglob("*.py") if path.name != "config.py")
    for entry in settings(Config()):
        name = entry.key.rpartition(".")[2]
        sections = "settings|config|calibration|asked|noise|dynamic|dynamic_sampling|correction|arithmetic|code"
        assert re.search(rf"\b({sections})\.{name}\b", code), f"nothing reads {entry.key}"


def test_every_setting_of_trl_is_taken_or_refused_by_name() -> None:
    import dataclasses

    from trl import GRPOConfig

    taken = set(Config.model_fields)
    for field in dataclasses.fields(GRPOConfig):
        assert field.name in taken or trl_hint(field.name), field.name
    assert not trl_hint("learning_rate")
    assert build_config({"noise.schedule": "linear", "noise": {"gain": 1.0}}).noise.gain == 1.0
    assert not load_config(None, ["dynamic_sampling=off"]).dynamic_sampling.enabled
    assert load_config(None, ["scale_rewards=false"]).scale_rewards == "none"
