"""What a reader may copy from a page is right: commands, their options and settings, Python, YAML, JSON."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from headway.cli import cli
from headway.config.layers import flatten
from headway.config.loading import load
from headway.config.schema_keys import known_keys
from headway.errors import ConfigError
from tests.docs.blocks import DOCS, PAGES, ROOT, Block, blocks, commands

pytestmark = pytest.mark.slow

COMMANDS = get_command(cli).commands  # type: ignore[attr-defined]
TARGETS = set(re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
KEYS = set(known_keys())
SECTIONS = {key.partition(".")[0] for key in KEYS}
SETTING = re.compile(r"[a-z_]+(\.\w+)*=.*", re.DOTALL)
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@every_page
def test_every_command_can_be_given(page: Path) -> None:
    for words in commands(page):
        problem = wrong_with(words)
        assert problem is None, f"{' '.join(words)}: {problem}"


def wrong_with(words: list[str]) -> str | None:
    match words:
        case ["headway", "--help" | "--version" | "--install-completion" | "…", *_]:
            return None
        case ["headway", name, *rest]:
            return _wrong_with_headway(name, rest)
        case ["make", *rest]:
            known = [word for word in rest if "=" not in word and not word.startswith("-")]
            unknown = {word for word in known if word not in TARGETS and not re.search(r"[A-Z…]", word)}
            return f"no target {unknown}" if unknown else None
        case ["python" | "python3", "-m", module, *_]:
            there = re.search(r"[A-Z…]", module) or importlib.util.find_spec(module) or module == "mkdocs"
            return None if there else f"no module {module}"
        case ["python" | "python3", file, *_] if "/" in file and file.endswith(".py"):
            return None if (ROOT / file).exists() else f"no file {file}"
        case ["pip", "install", *rest]:
            named = {extra for word in rest for extra in re.findall(r"headway\[([\w,-]+)\]", word)}
            return f"no extra {named}" if any({*name.split(",")} - {*EXTRAS} for name in named) else None
    return None


def _wrong_with_headway(name: str, rest: list[str]) -> str | None:
    command = COMMANDS.get(name)
    if command is None:
        return None if re.search(r"[A-Z…]", name) else f"no command {name}"
    parameters = [*command.params, *(each for sub in getattr(command, "commands", {}).values() for each in sub.params)]
    there = {option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)}
    options = {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)} - {"--help"}
    if options - there:
        return f"no option {options - there}"
    settings = [
        word for word in rest if SETTING.fullmatch(word) and word.partition(".")[0].partition("=")[0] in SECTIONS
    ]
    given = [word for word in settings if not re.search(r"[…]|=[A-Z]+$", word)]
    file = ROOT / rest[0] if rest and rest[0].endswith(".yaml") else None
    base = file if file is not None and file.exists() and "plan" not in file.parts else ROOT / "recipes" / "demo.yaml"
    load(base, given)
    return None


@every_page
def test_every_block_is_in_its_language(page: Path) -> None:
    for block in blocks(page):
        match block.language:
            case "python":
                compile(block.text, page.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            case "yaml":
                assert isinstance(yaml.safe_load(block.text), dict | list)
            case "json":
                assert all(json.loads(line) is not None for line in block.text.splitlines()) or json.loads(block.text)


def settings_of(block: Block) -> dict[str, object] | None:
    """A YAML block's settings, where all that it has are sections of a configuration."""
    values = yaml.safe_load(block.text) if block.language == "yaml" else None
    return dict(flatten(values)) if isinstance(values, dict) and set(values) <= {*SECTIONS, "mode"} else None


@every_page
def test_the_settings_of_yaml_blocks_are_valid(page: Path, tmp_path: Path) -> None:
    for block in blocks(page):
        if settings_of(block):
            file = tmp_path / "block.yaml"
            file.write_text(block.text, encoding="utf-8")
            overlaid = [f"{key}={json.dumps(value)}" for key, value in (settings_of(block) or {}).items()]
            load(file if "model" in yaml.safe_load(block.text) else ROOT / "recipes" / "demo.yaml", overlaid)


def test_there_is_much_to_check() -> None:
    assert sum(1 for page in PAGES for _ in commands(page)) > 150
    assert sum(settings_of(block) is not None for page in PAGES for block in blocks(page)) > 30
    assert {block.language for page in DOCS.rglob("*.md") for block in blocks(page)} >= {"", "python", "yaml", "sh"}


@pytest.mark.parametrize(
    "line",
    [
        "headway trian recipes/demo.yaml",
        "headway train recipes/demo.yaml --dryrun",
        "make dmeo",
        "python -m benchmarks.nothing",
        "pip install headway[all-of-it]",
    ],
)
def test_a_command_that_is_wrong_is_found(tmp_path: Path, line: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"Give it:\n\n    {line}\n")
    (words,) = commands(page)
    assert wrong_with(words) is not None


@pytest.mark.parametrize("setting", ["actor.optim.lr=fast", "actor.optim.rate=1"])
def test_a_setting_that_is_wrong_is_found(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"actor\.optim"):
        wrong_with(["headway", "train", "recipes/demo.yaml", setting])
