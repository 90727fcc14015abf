"""The picture of the pipeline, drawn in docs/architecture.md and shown elsewhere, and that of the imports."""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from graphlib import TopologicalSorter
from importlib import import_module
from inspect import isclass, signature
from pathlib import Path
from pkgutil import iter_modules

import pytest
from grimp import build_graph

from headway.pipeline import run, stages
from headway.pipeline.actor_critic import Actor, Critic
from headway.pipeline.episode_workers import EpisodeWorkers
from headway.pipeline.off_policy_guard import Guard
from headway.pipeline.recovery.checkpoint_manager import CheckpointManager
from headway.pipeline.recovery.run_monitor import RunMonitor
from headway.pipeline.recovery.supervision import Supervision
from headway.pipeline.stage import Stage
from headway.pipeline.stages.validate import Validators
from headway.pipeline.update.pause_controller import PauseController
from headway.pipeline.update.replica_pool import ReplicaPool
from headway.pipeline.update.version_transfer import VersionTransfer
from headway.pipeline.update.weight_loading import WeightLoading

ROOT = Path(__file__).parents[1]
FIRST, LAST = "┌──────── ground truth", "└─▶ Validate"


def picture_in(text: str) -> str:
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if FIRST in line)
    last = next(i for i, line in enumerate(lines) if LAST in line and i > first)
    return "\n".join(lines[first : last + 1])


DRAWN = picture_in((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "shown", [(ROOT / "README.md").read_text(encoding="utf-8"), run.__doc__], ids=["README", "run"]
)
def test_the_picture_is_the_same_wherever_it_is_shown(shown: str) -> None:
    assert picture_in(shown) == DRAWN


MODULES = [import_module(f"{stages.__name__}.{module.name}") for module in iter_modules(stages.__path__)]
CLASSES = {cls.__name__: cls for module in MODULES for cls in vars(module).values() if isclass(cls)}
STAGES = [cls for _, cls in sorted(CLASSES.items()) if issubclass(cls, Stage) and cls is not Stage]
MADE = (
    Actor,
    CheckpointManager,
    Critic,
    EpisodeWorkers,
    Guard,
    PauseController,
    ReplicaPool,
    RunMonitor,
    Supervision,
    Validators,
    VersionTransfer,
    WeightLoading,
)
"""Parts that stages are made with, and that watch over them."""


def test_each_stage_has_a_box_in_the_picture() -> None:
    boxes = set(re.findall(r"[A-Z][a-z]+(?:[A-Z][A-Za-z]+)?", DRAWN)) - {"MessageQueue", "Staleness"}
    assert {stage.__name__ for stage in STAGES} == boxes


@pytest.mark.parametrize("part", [*STAGES, *MADE], ids=lambda part: part.__name__)
def test_a_stage_or_part_of_the_pipeline_is_made_of_eight_things_at_most(part: type) -> None:
    assert len(signature(part).parameters) <= 8


def test_the_layers_in_the_docs_are_those_of_the_linter() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["id"] == "layers")
    section = (ROOT / "docs" / "architecture.md").read_text().split("## Layers")[1].split("\n## ")[0]
    told = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in section.splitlines() if line.startswith("| `")]
    assert told == [layer.split(" | ") for layer in layers]


def test_imports_make_no_circle_among_the_modules_and_packages_of_a_package() -> None:
    """A circle of modules anywhere is one of the children of the package that they share.

    Imports in functions and for the type checker count, too.
    """
    graph = build_graph("headway", cache_dir=None)
    imports: dict[tuple[str, ...], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))

    def place(module: str) -> tuple[str, ...]:
        return (*module.split("."), "__init__") if graph.find_children(module) else tuple(module.split("."))

    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            module, target = place(importer), place(imported)
            shared = next((n for n, (own, other) in enumerate(zip(module, target, strict=False)) if own != other), None)
            if shared is not None:
                imports[module[:shared]][module[shared]].add(target[shared])
    assert len(imports) > 50
    for children in imports.values():
        TopologicalSorter(children).prepare()  # raises CycleError, which names the circle
