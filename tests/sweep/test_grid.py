"""The grid is whole and checked before anything runs."""

from pathlib import Path

import pytest

from qerl.config import ConfigError
from qerl.recipe import default_recipe
from qerl.sweep.grid import folder_name, make_grid, split_values


def test_every_combination_for_every_seed(tmp_path: Path) -> None:
    words = ["learning_rate=1e-3,1e-4", "noise.schedule=off,linear", "lora_r=8", "seeds=2", f"output_dir={tmp_path}"]
    grid = make_grid(default_recipe(), words)
    assert grid.varied == ("learning_rate", "noise.schedule")
    assert len(grid.points) == 8
    assert [point.config.seed for point in grid.points] == [0] * 4 + [1] * 4  # a whole grid before the next seed
    first = grid.points[0]
    assert (first.config.learning_rate, first.config.noise.schedule, first.config.lora_r) == (1e-3, "off", 8)
    assert first.config.output_dir == tmp_path / first.name
    assert first.name == "learning_rate=1e-3_noise.schedule=off_seed=0"
    assert first.config.max_steps == 40  # the recipe's


def test_seeds_follow_the_recipes_or_are_named(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"seed: 5\noutput_dir: {tmp_path}/run\n")
    assert [point.config.seed for point in make_grid(recipe, ["seeds=3"]).points] == [5, 6, 7]
    assert [point.config.seed for point in make_grid(recipe, ["seed=2,9"]).points] == [2, 9]
    assert [point.config.seed for point in make_grid(recipe, ["lora_r=4,8"]).points] == [5, 5]
    assert make_grid(recipe, []).folder == tmp_path / "run-sweep"


def test_commas_part_values_outside_brackets_and_quotes() -> None:
    assert split_values("k=a,b") == ["a", "b"]
    assert split_values("k=[a,b],[c],all-linear") == ["[a,b]", "[c]", "all-linear"]
    assert split_values("k='x, y',z") == ["'x, y'", "z"]
    assert split_values("k=") == [""]
    points = make_grid(default_recipe(), ["lora_target_modules=[q_proj,v_proj],all-linear"]).points
    assert [point.config.lora_target_modules for point in points] == [("q_proj", "v_proj"), "all-linear"]
    assert len({point.name for point in points}) == 2
    assert all("/" not in point.name and "[" not in point.name for point in points)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("learning_rat=1,2", "Did you mean learning_rate"),
        ("learning_rate=1e-3,fast", "learning_rate = 'fast' is not usable"),
        ("lora_r=8,,16", "empty value"),
        ("lora_target_modules=[q_proj,v_proj", "is not closed"),
        ("lora_r=8],16", "closes nothing"),
        ("lora_r=8,8", "comes twice"),
        ("seeds=0", "say how many"),
        ("seeds=many", "say how many"),
        ("seed=a,b", "numbers from 0 on"),
        ("output_dir=a,b", "one folder"),
    ],
)
def test_what_can_not_be_run_is_refused(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_grid(default_recipe(), [word])
    with pytest.raises(ConfigError, match="given twice"):
        make_grid(default_recipe(), ["lora_r=8", "lora_r=16"])


def test_names_are_short_and_differ() -> None:
    long = [folder_name([f"model=/a/{'x' * 200}/{i}"]) for i in range(2)]
    assert max(map(len, long)) <= 100
    assert long[0] != long[1]
    assert folder_name(["a=1/2"]) != folder_name(["a=1-2"])
