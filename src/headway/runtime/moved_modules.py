"""Import of moved modules by their old documented paths, for one release, with a warning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_INTERFACES = {
    "episode_groups": ("keeper", "prompts", "rewards"),
    "rollout": ("calls", "generation", "rollout"),
    "training": ("advantages", "profiling", "steps", "training"),
    "weights": ("weights",),
}
"""Module of `headway.data.interfaces` → names that its parts had there or in ``headway.interfaces``."""
_LOSSES = ("covariance", "sequence", "soft")
_CORRECTIONS = ("base", "build", "prox", "ratio", "sequence_mask")
MOVED = {
    "headway.interfaces": "headway.data.interfaces",
    **{
        f"{package}.{name}": f"headway.data.interfaces.{module}"
        for module, names in _INTERFACES.items()
        for name in names
        for package in ("headway.interfaces", "headway.data.interfaces")
        if (package, name) != ("headway.data.interfaces", module)
    },
    **{f"headway.algorithms.corrections.{name}": "headway.algorithms.corrections" for name in _CORRECTIONS},
    "headway.algorithms.values": "headway.algorithms.losses.clipped",
    **{f"headway.algorithms.losses.{name}": "headway.algorithms.losses.clipped" for name in _LOSSES},
    "headway.algorithms.advantages.tokens": "headway.algorithms.advantages.groups",
    "headway.algorithms.filters": "headway.algorithms.scores",
    "headway.algorithms.overlong": "headway.algorithms.scores",
    "headway.programs.chat": "headway.agents.interface.program_chat",
    "headway.rewards.code": "headway.agents.rewards.code_reward",
    "headway.rewards.mathematics": "headway.agents.rewards.mathematics",
    "headway.rewards.request": "headway.agents.rewards.score_request",
    "headway.weights.protocols": "headway.engines.weights.protocols",
    "headway.user_code": "headway.runtime.user_code",  # named by the files in code/ of runs from Python
}
"""Old path of a module → its path now."""
RENAMED = {
    "Call": "GenerateRequest",
    "FetchEngine": "BatchEngine",
    "FinishedCall": "Completion",
    "FinishedGroup": "Group",
    "GroupRequest": "Group",
    "Incoming": "IncomingWeights",
    "Keeper": "EpisodeWorkerProtocol",
    "Outgoing": "OutgoingWeights",
    "Parcel": "StoredVersion",
}
"""Old name of a class in those modules → its name now."""
PARENTS = {"headway.programs", "headway.rewards", "headway.weights"}


class MovedModules(MetaPathFinder, Loader):
    """Finder of the old paths. Each becomes a module that looks its names up in the module's new place."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name in MOVED or name in PARENTS else None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in PARENTS:
            return
        new = MOVED[module.__name__]
        warnings.warn(f"{module.__name__} is now {new}; import that", DeprecationWarning, stacklevel=2)
        there = import_module(new)

        def look_up(name: str) -> object:
            if name.startswith("__") or not hasattr(there, RENAMED.get(name, name)):
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            if name in RENAMED:
                warnings.warn(f"{name} is now {RENAMED[name]} of {new}", DeprecationWarning, stacklevel=2)
            return getattr(there, RENAMED.get(name, name))

        module.__dict__["__getattr__"] = look_up


def install() -> None:
    """Add the finder, once: before other finders, which may find folders left behind by old versions."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())
