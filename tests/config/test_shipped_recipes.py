"""Recipes that come with Headway: found by their names and with their files, wherever a command is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.config.layers import read_file
from headway.config.loading import load
from headway.config.recipes import about, find_recipe, home, recipes, with_own_files
from headway.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory is not the clone's."""
    monkeypatch.chdir(tmp_path)


def test_they_are_those_of_the_clone() -> None:
    assert home() == ROOT
    assert set(recipes().values()) == set((ROOT / "recipes").rglob("*.yaml"))


@pytest.mark.parametrize("name", ["demo", "demo.yaml", "recipes/demo.yaml", "recipes/demo"])
def test_a_recipe_is_found_by_each_of_its_names(name: str) -> None:
    assert find_recipe(Path(name)) == ROOT / "recipes/demo.yaml"


def test_the_last_part_of_a_name_is_enough() -> None:
    assert find_recipe(Path("gspo")) == ROOT / "recipes/algorithms/gspo.yaml"


def test_a_file_of_ones_own_comes_before_a_recipe_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()  # a folder is no file
    assert find_recipe(Path("demo")) == ROOT / "recipes/demo.yaml"
    (tmp_path / "demo.yaml").write_text("mode: on_policy\n")
    assert find_recipe(Path("demo.yaml")) == Path("demo.yaml")


@pytest.mark.parametrize("name", [name for name in recipes() if not name.startswith("plan/")])
def test_every_recipe_loads_from_anywhere_and_its_files_are_there(name: str) -> None:
    config = load(Path(name)).config.model_dump(mode="json")
    named = [text for text in texts(config) if "recipes/" in text or "examples/" in text]
    assert all(Path(text.partition(":")[0]).is_file() for text in named), named


def texts(value: object) -> list[str]:
    match value:
        case str():
            return [value]
        case dict():
            return [text for inner in value.values() for text in texts(inner)]
        case list():
            return [text for inner in value for text in texts(inner)]
    return []


def test_a_path_that_is_here_stays_relative(tmp_path: Path) -> None:
    given = ["recipes/agents/guess.py:play", {"own": "recipes/mine.py:f"}, "recipes are fine", 8]
    assert with_own_files(given) == [f"{ROOT}/recipes/agents/guess.py:play", *given[1:]]
    (tmp_path / "recipes/agents").mkdir(parents=True)
    (tmp_path / "recipes/agents/guess.py").touch()
    assert with_own_files(given) == given


def test_a_copy_of_a_recipe_can_lie_on_another_one(tmp_path: Path) -> None:
    copy = tmp_path / "mine.yaml"
    copy.write_text((ROOT / "recipes/algorithms/gspo.yaml").read_text())
    assert [layer.file for layer in read_file(copy)] == [ROOT / "recipes/demo.yaml", copy]


def test_a_name_that_is_nearly_a_recipes_gets_that() -> None:
    with pytest.raises(ConfigError, match=r"^gsm8k: .* gsm8k-grpo \(headway recipes"):
        load(Path("gsm8k"))


def test_what_a_recipe_is_about_is_its_first_sentence() -> None:
    assert about(ROOT / "recipes/demo.yaml") == "The demo: a tiny model learns to sort, by asynchronous GRPO"
    assert all(map(about, recipes().values()))
