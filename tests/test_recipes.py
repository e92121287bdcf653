from pathlib import Path

import pytest

from qerl.recipe import load_config

RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml"))


def test_there_are_recipes() -> None:
    assert RECIPES


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads(recipe: Path) -> None:
    load_config(recipe)
