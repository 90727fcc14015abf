"""Every row of docs/errors.md: its input ends with its message and its exit code, without a traceback, before anything
was started. The tables and the cases of `tests.cli.wrong_inputs` name each other: neither has what the other lacks."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headway.api.checks import preflight
from headway.cli import cli
from headway.config.sections.model_section import MakeModelConfig
from headway.errors import ModelError, RunError
from headway.models.made_model import make_model
from tests.cli.wrong_inputs import (
    AGENT,
    CASES,
    IN_A_PROCESS,
    IN_THE_RUN,
    RECIPE,
    ROWS,
    closed_port,
    model_with_a_template_and_a_tool,
)
from tests.tiers import mostly_slow

DOCUMENT = Path(__file__).parents[2] / "docs" / "errors.md"


@dataclass(frozen=True)
class Row:
    message: str
    exit_code: int


ANCHOR = re.compile(r'^<a id="([a-z0-9-]+)"></a>')
"""A link to a row, at the beginning of its first cell."""


def _table(*sections: str) -> dict[str, Row]:
    """Input → what the document says of it, of the sections with these titles; the exit code is in the title above."""
    rows: dict[str, Row] = {}
    section, code = "", 0
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        if found := re.match(r"## Exit code (\d+)", line):
            code = int(found[1])
        if line.startswith(("## ", "### ")):
            section = line.removeprefix("### ")
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("| <a id=") else []
        if section not in sections or len(cells) != 3:
            continue
        name = ANCHOR.sub("", cells[0])
        assert name not in rows, f"{name} is there twice"
        rows[name] = Row(cells[1].strip("`").strip(), code)
    return rows


BEFORE_THE_RUN = _table(
    "Command and file",
    "Settings",
    "Model",
    "Mesh",
    "Data",
    "Reward",
    "Programs",
    "Run directory and cluster",
    "Servers that are away",
)
WHILE_IT_RUNS = _table("Nothing to train on")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing wrong in it."""
    folder = tmp_path_factory.mktemp("good")
    model = MakeModelConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=8,
        intermediate_size=16,
        max_position_embeddings=64,
    )
    make_model(model, 0, folder / "model")
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "train.jsonl").write_text(ROWS)
    return folder


@pytest.fixture
def here(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of `good`, as the working directory."""
    folder = tmp_path / "here"
    shutil.copytree(good, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(preflight, "LOAD_TIMEOUT_S", preflight.LOAD_TIMEOUT_S)  # and back
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    before = dict(os.environ)
    yield folder
    os.environ.clear()
    os.environ.update(before)


def _matches(message: str, shown: str, folder: Path) -> bool:
    """``…`` in the document stands for anything."""
    pattern = ".*?".join(re.escape(part) for part in message.split("…"))
    plain = " ".join(shown.replace(f"{folder}/", "").split())
    return re.fullmatch(f"(.* )?[Ee]rror: {pattern}", plain) is not None


def test_the_document_lists_the_cases_and_nothing_else() -> None:
    assert set(BEFORE_THE_RUN) == set(CASES)
    assert set(WHILE_IT_RUNS) == set(IN_THE_RUN)


def test_what_happens_while_a_run_goes_on_names_the_test_that_shows_it() -> None:
    rows = [line.strip("| ").split(" | ") for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if "::" in line]
    assert len(rows) > 50
    for what, _, named in rows:
        path, _, name = named.strip("`").partition("::")
        source = DOCUMENT.parents[1] / path
        assert source.is_file(), f"{what}: there is no {path}"
        assert re.search(rf"^(async )?def {name}\(", source.read_text(encoding="utf-8"), re.MULTILINE), named


def test_every_row_has_an_anchor_of_its_own() -> None:
    _, _, tables = DOCUMENT.read_text(encoding="utf-8").partition("\n## Exit code 2")
    heads = ("| input |", "| what happens |")
    rows = [line[2:] for line in tables.splitlines() if line.startswith("| ") and not line.startswith(heads)]
    anchors = [found and found[1] for found in map(ANCHOR.match, rows)]
    assert len(anchors) == len(set(anchors)) > 250
    assert None not in anchors


def test_the_input_that_the_cases_spoil_is_good(here: Path) -> None:
    done = CliRunner().invoke(cli, ["train", "recipe.yaml", "--dry-run"])
    assert done.exit_code == 0, done.stderr


@mostly_slow("name", CASES, quick=[name for name in CASES if name not in IN_A_PROCESS])
def test_a_wrong_input_ends_in_one_message_before_anything_starts(name: str, here: Path) -> None:
    """Some of the commands load a tokenizer and data, or wait for a server."""
    case, row = CASES[name], BEFORE_THE_RUN[name]
    case.prepare(here)
    before = {path: path.is_dir() for path in here.rglob("*") if "__pycache__" not in path.parts}
    arguments = [argument.replace("PORT", str(closed_port())) for argument in case.arguments]
    if case.dry:
        arguments.append("--dry-run")
    done = CliRunner().invoke(cli, [*case.command, *arguments])
    assert done.exit_code == row.exit_code, done.stderr
    assert _matches(row.message, done.stderr, here), done.stderr
    assert "Traceback" not in done.stderr
    assert case.dry or done.stdout == ""
    assert {path: path.is_dir() for path in here.rglob("*") if "__pycache__" not in path.parts} == before


@pytest.mark.parametrize("command", ["train", "doctor", "eval"])
def test_a_model_that_cannot_be_trained_is_refused_alike_by_every_command_and_leaves_no_trace(
    command: str, here: Path
) -> None:
    CASES["logits that are made in another way"].prepare(here)
    before = set(here.rglob("*"))
    arguments = {"eval": ["model", "train.jsonl"]}.get(command, ["recipe.yaml"])
    done = CliRunner().invoke(cli, [command, *arguments])
    assert done.exit_code == 2, done.stderr
    assert _matches(BEFORE_THE_RUN["logits that are made in another way"].message, done.stderr, here), done.stderr
    assert set(here.rglob("*")) == before


@pytest.mark.parametrize("user", [True, False], ids=["the user's mistake", "another failure"])
def test_a_start_that_is_refused_by_a_worker_leaves_the_directory_free(
    user: bool, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise ModelError("not this model") if user else RunError("a worker broke")

    monkeypatch.setattr("headway.cluster.backend.start_backend", refuse)
    done = CliRunner().invoke(cli, ["train", "recipe.yaml"])
    assert done.exit_code != 0 and "error: " in done.stderr, done.stderr
    assert (here / "run").exists() != user


def test_a_port_of_the_endpoint_that_is_in_use_is_one_message_and_leaves_the_directory_free(here: Path) -> None:
    model_with_a_template_and_a_tool(here)
    (here / "agent.py").write_text(AGENT)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        settings = ["agent.client=agent.py:run", f"agent.endpoint_port={listening.getsockname()[1]}"]
        done = CliRunner().invoke(cli, ["train", "recipe.yaml", *settings])
    assert done.exit_code == 2, done.stderr
    said = "the endpoint for agents cannot listen at 127.0.0.1:…; set agent.endpoint_port=0 for any free port, …"
    assert _matches(said, done.stderr, here), done.stderr
    assert "Traceback" not in done.stderr
    assert not (here / "run").exists()


@mostly_slow("name", IN_THE_RUN, quick=["raises"])
def test_a_reward_of_no_use_ends_the_run_with_its_reason(name: str, here: Path) -> None:
    """Makes a whole run, with processes that score."""
    row = WHILE_IT_RUNS[name]
    (here / "reward.py").write_text(IN_THE_RUN[name])
    settings = ("rollout.total_rollout_steps=1", "actor.ppo_mini_batch_size=1", "algorithm.filter_groups.enable=true")
    done = CliRunner().invoke(cli, ["train", "recipe.yaml", "reward.function=reward.py:score", *settings])
    assert done.exit_code == row.exit_code, done.stderr
    assert _matches(row.message, done.stderr, here), done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads((here / "run" / "summary.json").read_text())["status"] == "failed"


def test_debug_shows_where_an_error_was_raised(here: Path) -> None:
    done = CliRunner().invoke(cli, ["train", "recipe.yaml", "data.train=nowhere.jsonl", "--dry-run", "--debug"])
    assert done.exit_code == 2
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: nowhere.jsonl: no such file")
