"""What the docs show runs, and what they link to is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_api_page_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall((ROOT / "docs" / "api.md").read_text())
    assert len(blocks) >= 6
    names: dict[str, object] = {"__name__": "api_page"}
    for block in blocks:
        exec(compile(block, "docs/api.md", "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_python_in_the_docs_compiles(page: Path) -> None:
    for block in BLOCK.findall(page.read_text()):
        compile(block, str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_links_to_files_and_recipes_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    missing = [target for target in targets if target and not (page.parent / target).exists()]
    recipes = [name for name in re.findall(r"\brecipes/[a-z0-9_]+\.yaml", text) if not (ROOT / name).exists()]
    assert missing + recipes == []
