"""What the pages of the algorithms tell the user to write is a configuration that the doctor lets pass."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from headway.config.doctor import diagnose
from headway.config.layers import flatten

from .conftest import Load

PAGES = Path(__file__).parents[2] / "docs" / "algorithms"
BLOCKS = [
    pytest.param(page.stem, block, id=f"{page.stem}-{number}")
    for page in sorted(PAGES.glob("*.md"))
    for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "block"), BLOCKS)
def test_the_usage_on_a_page_is_a_configuration(minimal: Load, page: str, block: str) -> None:
    settings = {"agent.environment": None, **flat(block)}
    model = ["model.make.chat_template=x"] if settings["agent.environment"] else []  # the others' has none
    diagnose(minimal(*model, *(f"{key}={json.dumps(value)}" for key, value in settings.items())))


def flat(block: str) -> dict[str, object]:
    return dict(flatten(yaml.safe_load(block)))


def test_every_page_shows_how_to_use_it() -> None:
    assert {param.values[0] for param in BLOCKS} == {page.stem for page in PAGES.glob("*.md")}
