"""What the docs show runs, and what they link to is there."""

import csv
import re
import shlex
from pathlib import Path

import pytest
import typer

from qerl.cli import app
from qerl.cli.words import split_words
from qerl.recipe import default_recipe, load_config
from qerl.sweep.grid import make_grid

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"(?:^|`)qerl ([a-z-]+(?:[^`\\\n]|\\\n)*)", re.MULTILINE)
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


def commands(page: Path) -> list[list[str]]:
    """The words after `qerl` of every command on a page, in blocks and in running text. `...` stands for anything."""
    found = [match.replace("\\\n", " ").partition("  #")[0] for match in COMMAND.findall(page.read_text())]
    return [shlex.split(text) for text in found if not text.startswith("is ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_commands_in_the_docs_exist_and_take_what_they_are_shown_with(page: Path) -> None:
    for name, *words in commands(page):
        group = typer.main.get_command(app)
        command = group.commands[name]
        if isinstance(command, typer.core.TyperGroup) and words:
            command = command.commands[words.pop(0)]
        if name == "lm-eval":
            continue  # all its words are lm-eval's
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= options, (name, words)
        settings = [word for word in words if "=" in word and "..." not in word and word != "key=value"]
        if name in ("train", "plan", "config", "sweep"):
            recipe = next((ROOT / word for word in words if word.startswith("recipes/")), default_recipe())
            given = split_words(settings)[1]
            make_grid(recipe, given) if name == "sweep" else load_config(recipe, given)


def test_every_page_is_linked_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    assert [page.name for page in PAGES[1:] if f"(docs/{page.name})" not in text] == []


def test_the_readmes_tokens_a_second_are_the_last_that_were_measured() -> None:
    last = {}
    with open(ROOT / "benchmarks" / "results" / "decode.csv") as file:
        for row in csv.DictReader(file):
            if (row["model"], row["rank"], row["timed"]) == ("qwen2.5-7b", "32", "every step"):
                last[row["base"], row["batch"]] = f"{float(row['tokens_per_s']):.0f}"
    lines = (ROOT / "README.md").read_text().replace("*", "").splitlines()
    table = {line.split(" | ")[0]: line.strip(" |").split(" | ")[1:] for line in lines if line.startswith("|")}
    for name, base in (("| qerl, NVFP4 + LoRA", "nvfp4"), ("| qerl, bf16 + LoRA", "bf16")):
        assert table[name] == [last[base, batch] for batch in table["| batch"]]


def test_every_module_stands_in_the_list_of_rooms() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    listed = [path for path in (ROOT / "qerl").rglob("*.py") if path.parent.name not in ("cli", "bench", "tiny")]
    named = set(re.findall(r"\w+", text))
    assert [str(path) for path in listed if path.stem not in named and not path.stem.startswith("__")] == []
