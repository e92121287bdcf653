"""Arguments that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Recipe = Annotated[Path | None, typer.Option("--recipe", "-r", help="YAML file with settings.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings as key=value, by their dotted keys.", show_default=False)
]
