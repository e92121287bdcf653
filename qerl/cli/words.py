"""Arguments that several commands share, and where they look for your modules."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

Recipe = Annotated[Path | None, typer.Option("--recipe", "-r", help="YAML file with settings.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings as key=value, by their dotted keys.", show_default=False)
]

Words = Annotated[
    list[str] | None,
    typer.Argument(
        help="A recipe (YAML), then settings as key=value. Without either: the tiny model on sums, on a CPU.",
        metavar="[RECIPE] [KEY=VALUE]...",
        show_default=False,
    ),
]


def split_words(words: list[str] | None) -> tuple[Path | None, list[str]]:
    """`[RECIPE] [KEY=VALUE]...` as a recipe, if there is one, and overrides."""
    if option := next((word for word in words or [] if word.startswith("-")), None):
        key = option.lstrip("-").partition("=")[0].replace("-", "_")
        raise ValueError(f"There is no option {option} (--help lists them). A setting is written {key}=VALUE.")
    recipes = [word for word in words or [] if "=" not in word]
    if len(recipes) > 1:
        raise ValueError(f"Give one recipe, not {len(recipes)}: {', '.join(recipes)}. Settings are written key=value.")
    return (Path(recipes[0]) if recipes else None), [word for word in words or [] if "=" in word]


def look_here() -> None:
    """Find modules in the folder where the command is called, your reward functions: a script does not by itself."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
