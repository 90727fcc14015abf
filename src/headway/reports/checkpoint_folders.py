"""Folders of a run's checkpoints: complete ones, and the removal of older ones (`CheckpointRetention`).

checkpoints/version_N          the trainer's, and the driver's state       renamed into place when it is whole …
checkpoints/critic/version_N   the critic's, where there is one            … after this one was
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from threading import Thread

from headway.events import CheckpointSaved, Event

PREFIX = "version_"


@dataclass(frozen=True, slots=True)
class Checkpoints:
    path: Path

    def actor(self, version: int) -> Path:
        return self.path / f"{PREFIX}{version}"

    def critic(self, version: int) -> Path:
        return self.path / "critic" / f"{PREFIX}{version}"

    def check_readable(self) -> None:
        """Raise `PermissionError` if the folder may not be read, in which `complete` finds nothing then."""
        if self.path.is_dir():
            next(self.path.iterdir(), None)

    def complete(self, *, with_critic: bool) -> list[int]:
        """Versions of the complete checkpoints, ascending; ``with_critic``: only those with the critic's folder."""
        found = dict(_versions(self.path))
        return sorted(version for version in found if not with_critic or self.critic(version).is_dir())

    def newest(self, recorded: Container[int], *, with_critic: bool) -> int | None:
        """The newest version with a complete checkpoint and a boundary in the run's record; None where there is none.

        ``recorded``: the versions whose boundaries are in the record.
        """
        return next((v for v in reversed(self.complete(with_critic=with_critic)) if v in recorded), None)

    def forget_above(self, version: int) -> None:
        """Remove checkpoints of versions after ``version``, and half-written or half-removed ones."""
        for folder in (self.path, self.path / "critic"):
            for later, path in list(_versions(folder)):  # a list: the folder changes while it is gone through
                if later > version:
                    rmtree(path)
            for pattern in (f".{PREFIX}*.partial", f".{PREFIX}*.old"):
                for path in folder.glob(pattern):
                    rmtree(path, ignore_errors=True)

    def set_aside(self, version: int) -> list[Path]:
        """Rename a version's folders so that they no longer count as a checkpoint. Returns them, for removal."""
        # The critic's first: after a kill in between, the trainer's folder is still found.
        there = [path for path in (self.critic(version), self.actor(version)) if path.is_dir()]
        return [path.rename(path.with_name(f".{path.name}.old")) for path in there]


@dataclass(slots=True)
class CheckpointRetention:
    """Observer that removes older checkpoints (``trainer.max_actor_ckpt_to_keep``) whenever one was saved.

    The newest checkpoint that the run can be resumed from stays. Removal is in a thread, as the files may be many.
    """

    checkpoints: Checkpoints
    keep: int | None
    """Number of newest checkpoints that stay; None for all."""
    recorded_version: Callable[[], int]
    """Function that returns the newest version in the run's record."""
    in_use: Callable[[], int | None] = lambda: None
    """Function that returns a version that stays for now."""
    _removing: list[Thread] = field(default_factory=list)

    def on_event(self, event: Event) -> None:
        if self.keep is None or not isinstance(event, CheckpointSaved):
            return
        # The newest checkpoint cannot be resumed from until the record on the disk mentions it.
        resumable = self.checkpoints.newest(range(self.recorded_version() + 1), with_critic=False)
        for version in self.checkpoints.complete(with_critic=False)[: -self.keep]:
            if version in (resumable, self.in_use()):
                continue
            try:
                aside = self.checkpoints.set_aside(version)
            except OSError:  # it stays, until the next one is saved
                continue
            for path in aside:
                thread = Thread(
                    target=rmtree, args=(path,), kwargs={"ignore_errors": True}, name=f"removes {path.name}"
                )
                # Beside the run: a checkpoint of many files on a network's disk takes minutes to remove.
                thread.start()
                self._removing = [*filter(Thread.is_alive, self._removing), thread]

    def close(self) -> None:
        """Wait until all removals under way are done."""
        for thread in self._removing:
            thread.join()


def _versions(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.glob(f"{PREFIX}*"):
        number = path.name.removeprefix(PREFIX)
        if path.is_dir() and number.isdecimal():
            yield int(number), path


FILE = "headway.json"
"""Name of the version's file in the model's folder, beside what Hugging Face writes."""


def write_version(model: Path, version: int) -> None:
    (model / FILE).write_text(json.dumps({"version": version}), encoding="utf-8")


def version_of(model: Path) -> int | None:
    """Return the version of an exported model; None if the folder does not say, or does not exist."""
    try:
        version = json.loads((model / FILE).read_text(encoding="utf-8"))["version"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return version if isinstance(version, int) else None
