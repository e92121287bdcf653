"""The data sets beside the repository, where there are some: tests on them skip where there are none."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def rows(name: str, most: int | None = None) -> list[dict[str, Any]]:
    """All rows of a file, or so many, evenly spread."""
    path = FOLDER / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"{path.name} is not beside the repository")
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return found if most is None else found[:: max(1, len(found) // most)]


def altered(text: str) -> str:
    """With its last digit changed; without digits, another answer."""
    digits = list(re.finditer(r"\d", text))
    if not digits:
        return f"{text}+1"
    last = digits[-1]
    return f"{text[: last.start()]}{(int(last[0]) + 1) % 10}{text[last.end() :]}"
