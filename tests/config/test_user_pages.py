"""What the pages for users say of keys, modes, files and commands is so."""

from __future__ import annotations

import re
import shlex
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from headway.cli import cli
from headway.config.doctor import diagnose
from headway.config.loading import load, mode_config
from headway.config.presets import PRESETS
from headway.config.schema_keys import known_keys
from headway.pipeline.admission.staleness import lag_bound

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
USER_PAGES = [DOCS / f"{name}.md" for name in ("quickstart", "your-own", "modes", "metrics", "troubleshooting")]
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
KEYS = set(known_keys())
SOURCES = (ROOT / "src", ROOT / "src" / "headway")
SECTIONS = {key.rsplit(".", depth)[0] for key in KEYS for depth in (1, 2, 3) if key.count(".") >= depth}
B = 16
"""Groups of a version: enough for the bounds of the modes' table to be what they are for all larger ones."""


def commands(page: Path) -> list[list[str]]:
    """Every ``headway …`` of a page's code blocks, as words."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"```(?:\w*)\n(.*?)```", text, re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    lines += [line.strip() for line in text.splitlines() if line.startswith("    ")]
    written = [line.removeprefix(".venv/bin/") for line in lines]
    return [shlex.split(line, comments=True) for line in written if line.startswith("headway ")]


def spans(text: str) -> set[str]:
    """What stands between backticks."""
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)))


def anchors(page: Path) -> set[str]:
    """The targets that GitHub makes of a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line) for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        external = "://" in link
        if not external and not (target.exists() and (not anchor or anchor in anchors(target))):
            dead.append(link)
    assert dead == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_of_the_code_that_a_page_names_is_there(page: Path) -> None:
    """As a path from the top of the checkout, or below src or src/headway."""
    named = {span for span in spans(page.read_text()) if re.fullmatch(r"[a-z_]+/[\w/]*\w\.py", span)}
    assert {name for name in named if not any((root / name).is_file() for root in (ROOT, *SOURCES))} == set()


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: page.stem)
def test_every_key_that_a_page_names_is_a_key(page: Path) -> None:
    top = {key.partition(".")[0] for key in KEYS} - {"mode"}
    found = spans(page.read_text())
    named = {match[0] for span in found if (match := re.match(r"[a-z_]+(?:\.[a-z_]+)+(?=$|[=:])", span))}
    named = {name for name in named if name.partition(".")[0] in top}
    assert named - KEYS - SECTIONS == set()


@pytest.mark.parametrize("page", [*USER_PAGES, DOCS / "algorithms" / "health.md"], ids=lambda page: page.stem)
def test_every_metric_that_a_page_names_is_on_the_page_of_metrics(page: Path) -> None:
    metrics = spans((DOCS / "metrics.md").read_text())
    families = {name.partition("/")[0] for name in metrics if "/" in name}
    named = {re.sub(r"/lag_(\d|4_up)$", "/LAG", name) for name in spans(page.read_text())}
    named = {name for name in named if re.fullmatch(r"[a-z_]+/[\w/]+", name) and name.partition("/")[0] in families}
    assert named - metrics == set()


def test_names_of_metrics_are_found() -> None:
    assert {"offpolicy/ess", "lag/max", "trainer/idle_ratio"} <= spans((DOCS / "troubleshooting.md").read_text())


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: page.stem)
def test_settings_in_commands_are_keys(page: Path) -> None:
    given = {word.partition("=")[0] for words in commands(page) for word in words if re.match(r"[a-z_]+[\w.]*=", word)}
    assert given - KEYS - SECTIONS == set()


@pytest.mark.parametrize("page", [ROOT / "README.md", *USER_PAGES], ids=lambda page: page.stem)
def test_commands_and_their_options_exist(page: Path) -> None:
    known = {name: command.params for name, command in get_command(cli).commands.items()}  # type: ignore[attr-defined]
    for words in commands(page):
        options = {word for word in words[2:] if word.startswith("-") and not word[1:2].isdigit()}
        there = {option for parameter in known[words[1]] for option in parameter.opts}
        assert options <= there, words


def test_the_user_pages_have_commands_to_check() -> None:
    assert sum(len(commands(page)) for page in USER_PAGES) > 15


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, id=f"{page.stem}-{number}")
        for page in USER_PAGES
        for number, words in enumerate(commands(page))
        if words[1] in ("train", "doctor") and words[2].startswith("recipes/") and "FOLDER" not in " ".join(words)
    ],
)
def test_a_command_that_trains_a_recipe_passes_the_doctor(words: list[str]) -> None:
    overrides = [word for word in words[3:] if not word.startswith("--")]
    diagnose(load(ROOT / words[2], overrides))


@pytest.mark.parametrize("mode", PRESETS)
def test_the_table_of_modes_has_each_modes_values_and_proved_bound(mode: str) -> None:
    rows = [
        [cell.strip(" `") for cell in line.split("|")[1:-1]] for line in (DOCS / "modes.md").read_text().splitlines()
    ]
    (row,) = [cells for cells in rows if cells and cells[0] == mode]
    config = mode_config(mode)
    settings = config.async_training
    window = {"fifo": 1, "window": B, "ready": None}[settings.order]
    assert row[1] == config.cluster.placement
    assert int(row[2]) == settings.trigger_parameter_sync_step * settings.require_batches
    assert Fraction(row[3]) == settings.staleness_threshold
    assert int(row[4]) == lag_bound(settings.staleness_threshold, B, window)


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: page.stem)
def test_yaml_blocks_parse(page: Path) -> None:
    for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
        assert isinstance(yaml.safe_load(block), dict)
