"""A grid of settings from `key=a,b,c` words, each point a checked configuration, before anything runs."""

import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qerl.config import Config, ConfigError
from qerl.recipe import load_config

PAIRS = {"]": "[", "}": "{", ")": "("}
LONGEST_NAME = 100  # of a run's folder


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    name: str  # of its folder
    words: tuple[str, ...]  # overrides of the recipe, as `qerl train` takes them; without output_dir
    config: Config


@dataclass(frozen=True)
class Grid:
    recipe: Path
    folder: Path  # for all of the sweep
    varied: tuple[str, ...]  # keys with several values
    points: tuple[Point, ...]


def make_grid(recipe: Path, words: Sequence[str]) -> Grid:
    """Every combination of the values, for every seed; `seeds=3` are three, from the recipe's seed on.

    A whole grid comes before the next seed, so that a sweep cut short can be compared. Bad keys and values are refused.
    """
    values: dict[str, list[str]] = {}
    for word in words:
        key, equals, _ = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"{word!r} is not a setting; write key=value or key=a,b,c.")
        if key in values:
            raise ConfigError(f"{key} is given twice. Write its values in one word: {key}=a,b,c.")
        values[key] = split_values(word)
    folder = _folder(recipe, values)
    seeds = _seeds(recipe, values)
    varied = [key for key, options in values.items() if len(options) > 1]
    fixed = [f"{key}={options[0]}" for key, options in values.items() if key not in varied]
    points: list[Point] = []
    for seed in seeds:
        for chosen in itertools.product(*(values[key] for key in varied)):
            settings = [f"{key}={value}" for key, value in zip(varied, chosen, strict=True)]
            name = folder_name([*settings, f"seed={seed}"])
            given = (*fixed, *settings, f"seed={seed}")
            points.append(Point(name, given, load_config(recipe, [*given, f"output_dir={folder / name}"])))
    names = [point.name for point in points]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"The same run comes twice: {min(twice)}. Give each value once.")
    return Grid(recipe, folder, tuple(varied), tuple(points))


def split_values(word: str) -> list[str]:
    """The values of key=a,b,c: split at commas outside brackets and quotes, so that a list is one value."""
    key, _, text = word.partition("=")
    values, opened, quote = [""], [""], ""
    for letter in text:
        if letter == "," and not quote and len(opened) == 1:
            values.append("")
            continue
        values[-1] += letter
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in PAIRS.values():
            opened.append(letter)
        elif letter in PAIRS and opened.pop() != PAIRS[letter]:
            raise ConfigError(f"{word!r}: a {letter} closes nothing. A list is one value: {key}=[a,b],[c].")
    if quote or len(opened) > 1:
        raise ConfigError(f"{word!r}: {quote or opened[-1]} is not closed. A list is one value: {key}=[a,b],[c].")
    values = [value.strip() for value in values]
    if len(values) > 1 and "" in values:
        raise ConfigError(f"{word!r} has an empty value between commas. A list is one value: {key}=[a,b],[c].")
    return values


def folder_name(settings: Sequence[str]) -> str:
    """Settings as a name that every file system takes; a long one is cut and marked by a hash of the whole."""
    text = "_".join(re.sub(r"[^A-Za-z0-9._=+-]+", "-", setting) for setting in settings)
    exact = "_".join(settings)
    if len(text) <= LONGEST_NAME and text == exact:
        return text
    return f"{text[: LONGEST_NAME - 9]}_{hashlib.sha256(exact.encode()).hexdigest()[:8]}"


def _folder(recipe: Path, values: dict[str, list[str]]) -> Path:
    given = values.pop("output_dir", None)
    if given is None:
        asked = load_config(recipe).output_dir
        return asked.with_name(f"{asked.name}-sweep")
    if len(given) > 1:
        raise ConfigError("output_dir is one folder; each run of the sweep gets a folder inside it.")
    return Path(given[0]).expanduser()


def _seeds(recipe: Path, values: dict[str, list[str]]) -> list[int]:
    count, listed = values.pop("seeds", None), values.pop("seed", None)
    if count is None and listed is None:
        return [load_config(recipe).seed]
    if count is not None and listed is not None and len(listed) > 1:
        raise ConfigError("Give either seeds=N or the seeds themselves, seed=0,1,2.")
    if listed is not None and not all(value.isdecimal() for value in listed):
        raise ConfigError(f"seed={','.join(listed)}: seeds are numbers from 0 on.")
    if count is None:
        return [int(value) for value in listed or ()]
    if len(count) > 1 or not count[0].isdecimal() or int(count[0]) < 1:
        raise ConfigError(f"seeds={','.join(count)}: say how many, such as seeds=3. (seed=0,7 names them.)")
    first = int(listed[0]) if listed else load_config(recipe).seed
    return list(range(first, first + int(count[0])))
