"""The tables of other projects' keys: what they name is there, and no value of any key keeps a recipe from loading."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.config.layers import lies_in
from headway.config.loading import load
from headway.config.migration.settings_files import SettingsFile
from headway.config.migration.translation import recipe, report, translate
from headway.config.migration_tables.projects import PROJECTS, whole_key
from headway.config.migration_tables.table_rows import ReportPart
from headway.config.schema_keys import known_keys
from tests.tiers import mostly_slow

SECTIONS = ("rollout.engine_kwargs", "reward.params", "reward.functions", "data.train", "data.val", "mode")
ODD = [None, True, False, 0, 1, -1, 8, 1.5, 1e-6, "", "text", "a/b", "cosine", [], ["a"], {}, "8 x"]
VALUES = st.one_of(st.sampled_from(ODD), st.integers(-10, 10**6))


@pytest.mark.parametrize("name", PROJECTS)
def test_every_row_names_a_key_that_there_is_or_says_what_to_do(name: str) -> None:
    known = {*known_keys(), *SECTIONS}
    for key, row in PROJECTS[name].rows.items():
        if row.here:
            here = row.here.removesuffix(".*")
            assert any(lies_in(here, one) for one in known), (key, here)
        else:
            assert row.part is ReportPart.WITHOUT or row.note or row.convert, key
        assert row.part is not ReportPart.DIFFERS or row.note, key


@pytest.mark.parametrize("name", PROJECTS)
def test_every_mark_of_a_project_is_a_key_of_its_table(name: str) -> None:
    project = PROJECTS[name]
    for mark in project.marks:
        assert any(mark.rstrip("*") in key or key.startswith(mark.strip("*")) for key in project.rows) or (
            mark == "actor_rollout_ref.*"
        )


def test_a_key_of_nobody_is_found_nowhere() -> None:
    assert whole_key("banana.peel") is None


def loads(name: str, values: dict[str, Any], folder: Path) -> None:
    found = translate(PROJECTS[name], [SettingsFile("file", dict(values))])
    file = folder / "recipe.yaml"
    file.write_text(recipe(found, None))
    load(file)
    assert {one.key for one in found.outcomes if one.given} == set(values)
    text = report(found)
    assert all(f"  {key}=" in text for key in values)


@mostly_slow("name", PROJECTS, quick=["verl"])
def test_all_keys_of_a_project_at_once_make_a_recipe_that_loads(name: str, tmp_path: Path) -> None:
    keys = [key.replace("*", "x") for key in PROJECTS[name].rows]
    loads(name, dict(zip(keys, cycle(ODD), strict=False)), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROJECTS)
def test_any_values_of_a_projects_keys_make_a_recipe_that_loads(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Takes up to 8 s: each of 60 examples is translated, written and loaded several times."""
    keys = sorted(key.replace("*", "x") for key in PROJECTS[name].rows)
    folder = tmp_path_factory.mktemp(name)

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.dictionaries(st.sampled_from(keys), VALUES, min_size=1, max_size=8))
    def search(values: dict[str, Any]) -> None:
        loads(name, values, folder)

    search()
