"""Every setting of qerl, typed, checked when built, each with its help and unit.

A recipe is a YAML file that holds only what differs from the defaults; `key=value` words override it by dotted keys
(`quantize.method=rtn`). An unknown key or a value of the wrong type is an error that names the nearest valid key.
"""

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

Format = Literal["nvfp4", "mxfp4", "nf4"]
Method = Literal["rtn", "mse", "awq", "gptq"]


class ConfigError(ValueError):
    """A setting that can't be used; the message names it and what to write instead."""


def setting(default: Any, help: str, unit: str, **limits: Any) -> Any:
    """A field with its help and unit ("name" and "true/false" for what has none)."""
    return Field(default, description=help, json_schema_extra={"unit": unit}, **limits)


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, bool) and field.annotation in (int, float, str):
            raise ValueError(f"{value!r} is true/false, where a {field.annotation.__name__} belongs.")
        return value


class CalibrationConfig(Section):
    """The text that AWQ and GPTQ look at."""

    file: Path | None = setting(
        None, "JSONL (text, prompt or messages a row) or plain text; needed by awq and gptq.", "path"
    )
    num_samples: int = setting(256, "How many sequences to take from the file.", "sequences", ge=1)
    max_seq_length: int = setting(2048, "Length of a sequence.", "tokens", ge=16)


class QuantizeConfig(Section):
    """How 16-bit weights become 4-bit ones."""

    format: Format = setting("nvfp4", "4-bit format: nvfp4, mxfp4 or nf4.", "name")
    method: Method = setting(
        "mse",
        "Rounding: rtn (nearest), mse (best scale a block), awq or gptq (llm-compressor, calibration text).",
        "name",
    )
    double_quant: bool = setting(False, "nf4 only: store the blocks' absmax in 8 bits as well.", "true/false")
    ignore: tuple[str, ...] = setting(
        (), "Linear layers left in 16 bits besides the head: names, shell patterns, or re:expressions.", "patterns"
    )
    device: str = setting("auto", "Where to compute: cpu, cuda, cuda:1, or auto (a GPU if there is one).", "name")
    max_shard_size: float = setting(
        2.0, "Largest output file; a finished one survives an interruption.", "GB", gt=0, le=1000
    )
    calibration: CalibrationConfig = CalibrationConfig()

    @model_validator(mode="after")
    def _consistent(self) -> "QuantizeConfig":
        if self.double_quant and self.format != "nf4":
            raise ValueError(f"double_quant belongs to nf4, not to {self.format}. Drop it or set format=nf4.")
        if self.method in ("awq", "gptq"):
            if self.format == "nf4":
                raise ValueError(f"method {self.method} knows nvfp4 and mxfp4, not nf4. Use method=mse or rtn for nf4.")
        elif self.calibration.file is not None:
            raise ValueError(f"calibration.file is for awq and gptq; method {self.method} reads no text. Drop it.")
        return self

    @field_validator("ignore", mode="before")
    @classmethod
    def _one_pattern_is_a_list_of_one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class Config(Section):
    """All settings."""

    quantize: QuantizeConfig = QuantizeConfig()


@dataclass(frozen=True)
class Setting:
    """A resolved setting, for people to read."""

    key: str
    value: Any
    default: Any
    unit: str
    help: str


def load_config(recipe: Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """Defaults, then the recipe, then `key=value` overrides."""
    values = _read_recipe(recipe) if recipe else {}
    for word in overrides:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"{word!r} is not an override; write key=value, for example quantize.method=rtn.")
        try:
            value = text if text.startswith("*") else yaml.safe_load(text)  # a shell pattern, not a YAML alias
        except yaml.YAMLError as error:
            raise ConfigError(f"The value in {word!r} is not YAML: {str(error).splitlines()[0]}.") from error
        _put(values, key, value)
    return build_config(values)


def build_config(values: dict[str, Any]) -> Config:
    """A checked Config from nested values."""
    try:
        return Config.model_validate({key: value for key, value in values.items() if value is not None})
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(detail) for detail in error.errors())) from None


def settings(config: Config) -> list[Setting]:
    """Every setting with its dotted key, in the order of the classes above."""
    return list(_walk(config, type(config)(), ""))


def _walk(section: BaseModel, defaults: BaseModel, prefix: str) -> Iterator[Setting]:
    for name, field in type(section).model_fields.items():
        value, default = getattr(section, name), getattr(defaults, name)
        if isinstance(value, BaseModel):
            yield from _walk(value, default, f"{prefix}{name}.")
        else:
            extra = field.json_schema_extra
            unit = str(extra.get("unit", "")) if isinstance(extra, dict) else ""
            yield Setting(prefix + name, value, default, unit, field.description or "")


def _read_recipe(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"There is no recipe {path}.")
    try:
        values = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold `key: value` lines, not {type(values).__name__}.")
    return values


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for depth, name in enumerate(sections):
        inner = values[name] = {} if values.get(name) is None else values[name]  # an empty section reads as null
        if not isinstance(inner, dict):
            raise ConfigError(f"{key} can't be set: {'.'.join(sections[: depth + 1])} is a value, not a section.")
        values = inner
    values[last] = value


def _explain(detail: Any) -> str:
    """One validation error in a sentence, with the key it is about."""
    key = ".".join(str(part) for part in detail["loc"] if not isinstance(part, int))
    if detail["type"] == "extra_forbidden":
        inner = detail["input"]
        while isinstance(inner, dict) and inner:  # an unknown section: speak of the first setting in it
            name, inner = next(iter(inner.items()))
            key = f"{key}.{name}"
        return f"There is no setting {key}.{_nearest(key)}"
    if detail["type"] == "value_error":
        return f"{key or 'config'}: {detail['ctx']['error']}"
    known = {entry.key: entry for entry in settings(Config())}
    hint = f" ({known[key].help})" if key in known else _nearest(key)
    return f"{key} = {detail['input']!r} is not usable: {detail['msg']}.{hint}"


def _nearest(key: str) -> str:
    """Did you mean ...? by the whole dotted key, else by its last word."""
    keys = [entry.key for entry in settings(Config())]
    close = difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    if not close:
        last = {entry.rpartition(".")[2]: entry for entry in keys}
        close = [last[word] for word in difflib.get_close_matches(key.rpartition(".")[2], last, n=1, cutoff=0.5)]
    return f" Did you mean {close[0]}?" if close else f" Settings: {', '.join(keys)}."
