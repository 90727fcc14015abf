"""The public interface: its names and signatures, and the paths that documented modules had before they moved.

After a wanted change: ``python -m tests.test_public_interface > tests/public_interface.txt``, and a line in
CHANGELOG.md.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TypeVar

import pytest

from headway.runtime.moved_modules import MOVED, RENAMED

TABLE = Path(__file__).with_name("public_interface.txt")
MODULES = (
    *("headway", "headway.errors", "headway.data.tasks", "headway.data.gym", "headway.algorithms.registry"),
    *(f"headway.algorithms.{name}" for name in ("advantages", "losses", "corrections", "aggregation", "kl")),
    *sorted({new for new in MOVED.values() if new.startswith("headway.data.interfaces.")}),
)
TAUGHT = ("Problem", "Task")
"""Names that a module has from another one, and that docs import from it."""


def interface() -> Iterator[str]:
    """Yield a line for each public name: its module, itself and its signature, where it has one of its own."""
    for name in MODULES:
        module = import_module(name)
        for public in getattr(module, "__all__", None) or sorted(vars(module)):
            found = getattr(module, public)
            own = getattr(found, "__module__", None) == name or hasattr(module, "__all__") or public in TAUGHT
            if own and not public.startswith("_") and not isinstance(found, TypeVar):
                yield f"{name}.{public}{_signature(found)}"


def _signature(found: object) -> str:
    """Protocols, enumerations and exceptions without arguments of their own are told by their names alone."""
    told = inspect.isfunction(found)
    if inspect.isclass(found) and not getattr(found, "_is_protocol", False):
        told = dataclasses.is_dataclass(found) or inspect.isfunction(vars(found).get("__init__"))
    return re.sub(r" at 0x\w+", "", str(inspect.signature(found))) if told else ""  # type: ignore[arg-type]


def test_names_and_signatures_of_the_public_interface_are_those_of_the_table() -> None:
    """Takes seconds in a cold process: it imports torch and all public modules."""
    assert list(interface()) == TABLE.read_text(encoding="utf-8").splitlines()


def in_a_fresh_process(code: str, *options: str) -> str:
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("from headway.programs.chat import Chat", "headway.agents.interface.program_chat"),
        ("from headway.rewards.request import ScoreRequest", "headway.agents.rewards.score_request"),
        pytest.param(
            "from headway.rewards.mathematics import equals",
            "headway.agents.rewards.mathematics",
            marks=pytest.mark.slow,
        ),
        ("from headway.rewards.code import code_of", "headway.agents.rewards.code_reward"),
        pytest.param(
            "from headway.interfaces.rollout import RolloutEngine",
            "headway.data.interfaces.rollout",
            marks=pytest.mark.slow,
        ),
        ("from headway.interfaces.calls import Call", "Call is now GenerateRequest"),
        pytest.param(
            "from headway.data.interfaces.generation import GenerateRequest",
            "headway.data.interfaces.rollout",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "from headway.weights.protocols import Parcel", "Parcel is now StoredVersion", marks=pytest.mark.slow
        ),
        ("from headway.user_code import pickled_beside", "headway.runtime.user_code"),
        pytest.param(
            "from headway.interfaces.keeper import Keeper",
            "Keeper is now EpisodeWorkerProtocol",
            marks=pytest.mark.slow,
        ),
        ("from headway.interfaces import keeper", "headway.data.interfaces.episode_groups"),
    ],
)
def test_a_path_that_docs_taught_imports_and_warns_of_the_new_one(code: str, says: str) -> None:
    warned = "import warnings\nwith warnings.catch_warnings(record=True) as found:\n"
    warned += "    warnings.simplefilter('always')\n"
    shown = "print(*{(str(one.message), one.category.__name__, one.filename) for one in found}, sep='\\n')"
    told = [line for line in in_a_fresh_process(f"{warned}    {code}\n{shown}").splitlines() if says in line]
    assert told
    assert all("DeprecationWarning" in line and "<string>" in line for line in told)


def test_every_moved_path_leads_to_a_module_and_each_renamed_class_is_there_once() -> None:
    modules = [import_module(new) for new in MOVED.values()]
    assert [sum(hasattr(module, new) for module in modules) >= 1 for new in RENAMED.values()] == [True] * len(RENAMED)
    assert not any(hasattr(module, old) for module in modules for old in RENAMED)


@pytest.mark.parametrize(
    ("module", "name"), [("values", "value_loss"), ("losses.sequence", "gspo"), ("losses.covariance", "clip_cov")]
)
def test_algorithms_import_from_where_they_were(module: str, name: str) -> None:
    with pytest.warns(DeprecationWarning, match=r"is now headway\.algorithms\.losses\.clipped"):
        old = import_module(f"headway.algorithms.{module}")
    assert callable(getattr(old, name))


def test_other_paths_and_names_are_as_unknown_as_ever() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"headway\.programs\.own"):
        import_module("headway.programs.own")
    with pytest.warns(DeprecationWarning, match="is now"), pytest.raises(ImportError, match="Nothing"):
        exec("from headway.interfaces.steps import Nothing", {})


def test_importing_headway_imports_neither_torch_nor_the_layers_above() -> None:
    shown = in_a_fresh_process("import headway, sys; print(*sorted(m for m in sys.modules if m.startswith('headway')))")
    assert shown.split() == ["headway", "headway.runtime", "headway.runtime.moved_modules"]


if __name__ == "__main__":
    print(*interface(), sep="\n")
