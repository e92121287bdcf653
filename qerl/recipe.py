"""A Config from recipes and overrides, and errors that say what to write instead.

A recipe is a YAML file that holds only what differs from the defaults; `key=value` words override it by dotted keys
(`quantize.method=rtn`). An unknown key or a value of the wrong type is an error that names the nearest valid key.
"""

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from qerl.config import Config, ConfigError
from qerl.trl_names import trl_hint

PLURALS = {float: "numbers", int: "whole numbers", str: "names"}


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
        if not text.strip():
            raise ConfigError(f"{word!r} has no value. Write {key}=VALUE; {key}=null is qerl's default.")
        try:
            value = text if text.startswith("*") else yaml.safe_load(text)  # a shell pattern, not a YAML alias
        except yaml.YAMLError as error:
            raise ConfigError(f"The value in {word!r} is not YAML: {str(error).splitlines()[0]}.") from error
        _put(values, key, value)
    return build_config(values)


def default_recipe() -> Path:
    """The recipe of the default job, shipped with the package."""
    return Path(__file__).parent / "tiny" / "recipe.yaml"


def training_recipe(recipe: Path | None, overrides: Iterable[str]) -> tuple[Path | None, str]:
    """The recipe that a training starts from, and a line about it. Without one the default job's, but only for its own
    model and task: its learning rate and lengths suit no other."""
    if recipe is not None:
        if {key.partition(".")[0] for key in _read_recipe(recipe)} == {"quantize"}:
            raise ConfigError(
                f"{recipe} has only settings of quantize: it is a recipe for qerl quantize, not for training."
            )
        return recipe, f"Recipe: {recipe}."
    given, default = load_config(None, overrides), Config()
    if (given.model, given.task) == (default.model, default.task):
        return default_recipe(), "No recipe: the default job's, for the tiny model on sums (qerl/tiny/recipe.yaml)."
    return None, "No recipe: every setting that is not given has its default (qerl config lists them)."


def build_config(values: dict[str, Any]) -> Config:
    """A checked Config from nested values; keys may be dotted."""
    nested: dict[str, Any] = {}
    for key, value in _copied(values).items():
        if isinstance(value, dict) and isinstance(nested.get(key), dict):
            nested[key] |= value
        else:
            _put(nested, key, value)
    values = nested
    try:
        return Config.model_validate({key: value for key, value in values.items() if value is not None})
    except ValidationError as error:
        said = [_explain(detail, values) for detail in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(said))) from None  # a union's errors, one a kind, are one


def settings(config: Config) -> list[Setting]:
    """Every setting with its dotted key, in the order of qerl/config.py."""
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
    if path.is_dir():
        raise ConfigError(
            f"{path} is a folder, not a recipe (a YAML file). To go on with the run in it: --resume output_dir={path}."
        )
    if not path.is_file():
        raise ConfigError(f"There is no recipe {path}. Settings are written key=value.")
    try:
        values = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold `key: value` lines, not {type(values).__name__}.")
    return _copied(values)


def _copied(values: dict[Any, Any]) -> dict[str, Any]:
    """A copy, sections included; whose keys are all text."""
    if odd := [key for key in values if not isinstance(key, str)]:
        raise ConfigError(f"There is no setting {odd[0]!r}: a setting's name is text. `qerl config` lists them all.")
    return {key: _copied(value) if isinstance(value, dict) else value for key, value in values.items()}


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for depth, name in enumerate(sections):
        inner = values[name] = {} if values.get(name) is None else values[name]  # an empty section reads as null
        if not isinstance(inner, dict):
            raise ConfigError(f"{key} can't be set: {'.'.join(sections[: depth + 1])} is a value, not a section.")
        values = inner
    values[last] = value


def _explain(detail: Any, values: dict[str, Any]) -> str:
    """One validation error of these values in a sentence, with the key it is about."""
    key = ".".join(str(part) for part in detail["loc"] if not isinstance(part, int))
    if detail["type"] == "extra_forbidden":
        inner = detail["input"]
        while isinstance(inner, dict) and inner:  # an unknown section: speak of the first setting in it
            name, inner = next(iter(inner.items()))
            key = f"{key}.{name}"
        if hint := trl_hint(key):
            return hint
        return f"There is no setting {key}.{_nearest(key)}"
    if detail["type"] == "value_error":
        return f"{key or 'config'}: {detail['ctx']['error']}"
    if detail["type"] == "model_type":
        inner_key = next(entry.key for entry in settings(Config()) if entry.key.startswith(f"{key}."))
        return f"{key} = {detail['input']!r} is not usable: it is a section. Write {inner_key}=VALUE and the like."
    known = {entry.key: entry for entry in settings(Config())}
    setting = next(name for name in known if key == name or key.startswith(f"{name}."))  # of a union comes the kind
    if key == setting:
        return f"{key} = {detail['input']!r} is not usable: {detail['msg']}. ({known[key].help})"
    given, kind = _at(values, setting)
    return f"{setting} = {given!r} is not usable: write {_wanted(kind)}. ({known[setting].help})"


def _at(values: dict[str, Any], key: str) -> tuple[Any, Any]:
    """What was given for a setting, and the type that it has."""
    section: Any = Config
    *sections, last = key.split(".")
    for name in sections:
        values, section = values[name], section.model_fields[name].annotation
    return values[last], section.model_fields[last].annotation


def _wanted(kind: Any) -> str:
    """A setting's type in words."""
    if get_origin(kind) in (Union, UnionType):
        kinds = [one for one in get_args(kind) if one is not NoneType]
        return " or ".join(_wanted(one) for one in kinds)
    if get_origin(kind) is Literal:
        return ", ".join(get_args(kind))
    if get_origin(kind) is tuple:
        items = get_args(kind)
        count = "" if Ellipsis in items else f"{len(items)} "
        return f"a list of {count}{PLURALS[items[0]]} in brackets"
    return {int: "a whole number", float: "a number"}.get(kind, "text")


def _nearest(key: str) -> str:
    """Did you mean ...? by the whole dotted key or by its last word, whichever is nearer."""

    def likeness(known: str) -> float:
        pairs = ((key, known), (key.rpartition(".")[2], known.rpartition(".")[2]))
        whole, last = (difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)
        return max(whole, last) + 0.01 * whole

    keys = [entry.key for entry in settings(Config())]
    best = max(keys, key=likeness)
    return f" Did you mean {best}?" if likeness(best) > 0.6 else " `qerl config` lists all settings."
