"""The configuration reference: the page is what the schema says, says something of every key, and its defaults hold."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.config.layers import MAPPINGS, nest
from headway.config.migration_tables.projects import USUAL
from headway.config.presets import PRESETS
from headway.config.reference import page
from headway.config.schema import Config
from headway.config.schema_keys import REQUIRED, keys, known_keys, tables
from headway.config.sections.section import Section

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
ROWS = [
    [cell.replace("\\|", "|").strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| `")
]
DEFAULTS = {row[0].strip("`"): row[2].strip("`") for row in ROWS if len(row) == 4}
"""Key → default, as the page has them."""


def test_the_page_is_what_the_schema_says_now() -> None:
    assert PAGE.read_text() == page(), "run: python -m headway.config.reference > docs/configuration.md"


def test_the_page_has_every_key_once() -> None:
    named = [name.replace("[]", "") for name in DEFAULTS]
    sections = {
        "model.make",
        "model.warmup",
        "model.warmup.give_up",
        "data.task",
    }  # null by default: values, too
    lists = {"reward.functions"}
    lists |= {"agent.mcp"}  # by names that the user gives
    assert sorted(named) == sorted([*known_keys(), *sections, *lists])


def test_every_key_and_every_section_has_a_meaning() -> None:
    silent = [key.name for key in keys() if not key.meaning] + [table.name for table in tables() if not table.meaning]
    assert silent == []


def test_what_other_systems_call_a_setting_leads_to_keys_that_there_are() -> None:
    known = set(known_keys())
    assert {key for keys in USUAL.values() for key in keys} <= known
    assert USUAL.keys().isdisjoint(known)


def test_defaults_on_the_page_read_back_as_the_default_configuration() -> None:
    top = {
        name: yaml.safe_load(text)
        for name, text in DEFAULTS.items()
        if "[]" not in name
        and ".NAME." not in name
        and not name.startswith(("model.make.", "model.warmup.", "data.task.", "algorithm.policy_loss."))
    }
    assert Config.model_validate(nest(top)) == Config()


@pytest.mark.parametrize("section", ["model.make", "model.warmup", "data.task"])
def test_defaults_of_a_section_that_is_null_hold_once_it_is_given(section: str) -> None:
    given = {
        name: yaml.safe_load(text)
        for name, text in DEFAULTS.items()
        if name.startswith(f"{section}.") and text != REQUIRED and not name.startswith("model.warmup.give_up.")
    }
    assert given
    assert Config.model_validate(nest(given)) == Config.model_validate(nest({section: {}}))


def test_names_of_the_users_are_those_in_mappings() -> None:
    assert {key.plain for key in keys() if key.value.startswith("mapping") and ".NAME" not in key.name} == set(MAPPINGS)


def test_required_keys_are_those_without_which_their_section_is_refused() -> None:
    assert {name for name, text in DEFAULTS.items() if text == REQUIRED} == {
        "model.warmup.give_up.above",
        "model.warmup.give_up.rate",
        "reward.functions[].function",
    }


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rollout.max_concurrent", "integer > 0 or `null`"),
        ("rollout.test_freq", "integer ≥ -1, not 0"),
        ("rollout.top_p", "number > 0 and ≤ 1"),
        ("rollout.kv_cache_gib", "number > 0 or `null`"),
        ("rollout.logit_bias", "mapping of integer to number"),
        ("async_training.staleness_threshold", "exact number ≥ 0"),
        ("async_training.window", "integer > 0 or `B` or `null`"),
        ("async_training.order", "`fifo`, `window`, `ready`"),
        ("trainer.use_nodes_ratios", "list of 4: exact number ≥ 0 and ≤ 1 or `null`"),
        ("reward.functions", "non-empty list: section or `null`"),
        ("data.shuffle", "`true` or `false`"),
        ("mode", ", ".join(f"`{mode}`" for mode in PRESETS)),
    ],
)
def test_a_range_is_spelled_out(key: str, value: str) -> None:
    assert next(one.value for one in keys() if one.name == key) == value


def test_the_critics_learning_rate_is_its_own_and_not_that_of_its_class() -> None:
    assert float(DEFAULTS["critic.optim.lr"]) == 1e-5
    assert float(DEFAULTS["actor.optim.lr"]) == 1e-6


@pytest.mark.parametrize("annotation", [bytes, timedelta])
def test_a_type_that_there_are_no_words_for_is_an_error(annotation: Any) -> None:
    class Odd(Section):
        odd: annotation | None = None  # type: ignore[valid-type]

    with pytest.raises(TypeError, match="no words"):
        next(keys(Odd)).value  # noqa: B018
