"""The driver's part of the journal: scores, groups that ended early, and how batches were composed.

    Reward ──scored──▶ ┐                            ┌ the same scores, without asking the reward
    discard ──ended──▶ ├ RunJournal ── on resume ──▶├ the same groups out of the way
    take ──batch─────▶ ┘                            └ the same batches, in the order of the run

A resumed run repeats the work since its checkpoint: it admits the same groups, takes their completions from
`headway.data.journal`, scores and discards them as before, and trains on the same batches. No finished group is lost,
provided that the settings that make groups are unchanged.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import xxhash

from headway.config.schema import Config
from headway.data.interfaces.episode_groups import Group, Scores
from headway.data.journal import (
    GIVEN_UP,
    SETTINGS,
    JournalWriter,
    Record,
    block_of,
    give_up,
    segments,
    settings_in,
    written,
)
from headway.events import CheckpointSaved, EpisodeWorkerLost, Event, VersionReached
from headway.pipeline.admission.ledger import Fate

log = logging.getLogger(__name__)

DRIVER = "driver"
MAKES_GROUPS: Mapping[str, set[str]] = {
    "agent": {"workers", "environment_processes", "endpoint_host", "endpoint_port"},
    "algorithm": set(),
    "async_training": set(),
    "data": {"accept_changes"},
    "reward": {"workers", "timeout_s", "retries"},
}
"""Section of the settings that decide which groups are made and how they end -> its keys without such influence.
Sampling settings are left out: the record of each completion has its own."""


class RunJournal:
    """Journal of one run, as its driver writes and reads it. A `headway.events.Observer`."""

    def __init__(self, directory: Path, config: Config, tell: Callable[[str], object] = log.warning) -> None:
        """Open the journal. Other processes of the run may write to it, too. ``tell`` is called with a warning when the
        journal cannot be written any more.

        Raises `OSError` if the directory cannot be read or written.
        """
        self._directory = directory
        self._settings = settings_of(config)
        self._block = config.groups_per_version
        sync_s = config.run.journal_sync_s
        self._writer = JournalWriter(directory, DRIVER, groups_per_block=self._block, sync_s=sync_s, tell=tell)
        self._scores: dict[int, Record] = {}
        self._ends: dict[int, Record] = {}
        self._batches: dict[int, Record] = {}
        """Records of earlier processes. Scores and ends: group number -> record; batches: number of groups taken before
        -> record."""
        self._floors: dict[int, int] = {}
        """Version of a boundary -> number below which no group was open then."""
        self._given_up: dict[Path, int] = {}
        """File that marks a lost writer -> upper bound (exclusive) of the group numbers in that writer's records."""
        self._oldest_kept: int | None = None
        self._begun = False
        directory.mkdir(exist_ok=True)
        if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError("it may not be read, or not be written")
        before = settings_in(directory)
        self.run = before.get("run") or uuid4().hex
        """Id of the run, stored in its files and checkpoints to tell them from another run's."""
        self.left_out: str | None = None
        """Reason why the journal is not used; None if it is used."""
        if changed := changed_since(directory, config):
            self.left_out = f"{', '.join(changed)} changed"

    def _begin(self) -> None:
        """Write the journal's settings once, and remove records made under other settings. Not called at the start, so
        that a start that fails changes nothing."""
        if self._begun:
            return
        self._begun = True
        file, before, now = self._directory / SETTINGS, settings_in(self._directory), self._settings | {"run": self.run}
        if self.left_out or not before:
            file.unlink(missing_ok=True)  # first: a resumed run ignores a journal without settings
            for old in (*segments(self._directory), *self._directory.glob(f"{GIVEN_UP}*")):
                old.unlink(missing_ok=True)
        if self.left_out or before != now:
            draft = file.with_suffix(".tmp")
            with suppress(OSError):
                draft.write_text(json.dumps(now))
                draft.replace(file)  # atomic: with a torn file all finished work is repeated

    # ------------------------------------------------------------------------------------- resume

    def restore(self, consumed: int, run: str | None, tell: Callable[[str], object] = log.warning) -> None:
        """Read the records since the boundary after ``consumed`` groups. ``run``: the run's id in the checkpoint; a
        journal with another id is ignored. ``tell`` is called with a warning if other records are left out.
        """
        if self.run != run:
            found = settings_in(self._directory)
            why = "is of another run" if found else f"has no {SETTINGS} that can be read"
            self.left_out = f"{self._directory} {why}" if run else "the checkpoint was saved without a journal"
            self.run = run or self.run
        self._begin()
        kinds = {"scored": self._scores, "ended": self._ends, "batch": self._batches}
        for _, record in written(self._directory, DRIVER, tell=tell):
            kinds[record.values["kind"]][record.values["at"]] = record
        for taken in [taken for taken in self._batches if taken < consumed]:
            del self._batches[taken]

    def composed(self, taken: int) -> dict[int, tuple[int, ...]] | None:
        """Return number -> identity of the groups of the batch after ``taken`` groups; None if no such batch is
        recorded.
        """
        record = self._batches.get(taken)
        return None if record is None else {number: tuple(of) for number, *of in record.values["groups"]}

    def forget_batches(self) -> None:
        """Forget all recorded batches, since one of them cannot be repeated."""
        self._batches.clear()

    # ------------------------------------------------------------------------------------- groups

    async def scores(self, group: Group, score: Callable[[], Awaitable[Scores]]) -> Scores:
        """Return the recorded scores for the group's answers, or else the result of ``score``."""
        record, answers = self._scores.pop(group.number, None), _answers(group)
        if record is not None and record.values["answers"] == answers:
            # A copy: an array over the record's bytes is read-only.
            return Scores(np.frombuffer(record.data, np.float32).copy(), record.values["parts"])
        scores = await score()
        values = {"kind": "scored", "at": group.number, "answers": answers, "parts": dict(scores.parts)}
        self._writer.append(group.number, Record(values, scores.rewards.astype(np.float32).tobytes()))
        return scores

    def end(self, number: int, group: tuple[int, int, int]) -> tuple[Fate, str, int] | None:
        """Return fate, reason and number of failed episodes of the group with this number and identity. None if it did
        not end early."""
        record = self._ends.pop(number, None)
        if record is None or record.values["prompt"] != [*group]:
            return None
        return Fate(record.values["fate"]), record.values["reason"], record.values["failed"]

    def ended(self, number: int, group: tuple[int, int, int], fate: Fate, reason: str, failed: int) -> None:
        values = {"kind": "ended", "at": number, "prompt": group, "fate": fate.value}
        self._writer.append(number, Record({**values, "reason": reason, "failed": failed}))

    def batch(self, taken: int, groups: Mapping[int, tuple[int, ...]]) -> None:
        """Record the batch ``groups``, number -> identity, taken after ``taken`` other groups."""
        self._batches.pop(taken, None)
        numbers = [[number, *of] for number, of in groups.items()]
        # Written to the block of the batch's oldest group, which is open until the batch ends: until then the block is
        # kept.
        self._writer.append(min(groups), Record({"kind": "batch", "at": taken, "groups": numbers}))

    # ------------------------------------------------------------------------------------- size

    def boundary(self, version: int, floor: int) -> None:
        """Note that no group with a number below ``floor`` is open at the boundary of ``version``."""
        self._begin()
        self._floors[version] = floor

    def on_event(self, event: Event) -> None:
        """Remove files older than the last checkpoint but one. Fence off a lost episode worker."""
        if isinstance(event, EpisodeWorkerLost):
            give_up(self._directory, event.worker)
            self._given_up.pop(self._directory / f"{GIVEN_UP}{event.worker}", None)  # the worker has written more since
        if isinstance(event, VersionReached):
            # Remembered for removal: a file left behind made a resumed run's worker of the same name count as given up.
            new = {*self._directory.glob(f"{GIVEN_UP}*")} - {*self._given_up}
            # An earlier process may have admitted more groups than this one has so far.
            self._given_up |= {path: max([event.groups["admitted"], *self._until().values()]) for path in new}
        if isinstance(event, CheckpointSaved):
            oldest, self._oldest_kept = self._oldest_kept, event.version
            if oldest is not None and (floor := self._floors.get(oldest)) is not None:
                for path in [path for path, end in (self._until() | self._given_up).items() if end <= floor]:
                    with suppress(OSError):  # retried at the next checkpoint
                        path.unlink()
                        self._given_up.pop(path, None)
                self._floors = {version: of for version, of in self._floors.items() if version >= oldest}

    def _until(self) -> dict[Path, int]:
        """Return file of records -> upper bound (exclusive) of its group numbers."""
        return {path: (block_of(path) + 1) * self._block for path in segments(self._directory)}

    def close(self) -> None:
        self._writer.close()


def changed_since(directory: Path, config: Config) -> list[str] | None:
    """Return the sections of `MAKES_GROUPS` that differ from the journal in ``directory``; None without a journal."""
    if not (before := settings_in(directory)):
        return None
    return [name for name, digest in settings_of(config).items() if before.get(name, digest) != digest]


def settings_of(config: Config) -> dict[str, str]:
    """Return a digest of each section of `MAKES_GROUPS`, including the files of user functions that it names."""
    digests = {}
    for name, others in MAKES_GROUPS.items():
        values = getattr(config, name).model_dump(mode="json", exclude=others)
        digest = xxhash.xxh64(json.dumps(values, sort_keys=True).encode())
        for path in _files(values):
            digest.update(path.read_bytes())
        digests[name] = digest.hexdigest()
    return digests | {"rollout.n": str(config.rollout.n)}


def _files(values: Any) -> list[Path]:
    """Return the existing files named in ``values``, at any depth, in the form ``file.py:function``."""
    if isinstance(values, Mapping):
        return [path for value in values.values() for path in _files(value)]
    if isinstance(values, list):
        return [path for value in values for path in _files(value)]
    path = Path(values.rpartition(":")[0]) if isinstance(values, str) and ".py:" in values else None
    return [path] if path is not None and path.is_file() else []


def _answers(group: Group) -> int:
    """Return a digest of the input of scoring: the answers, rewards of programs, and the prompt's answer and
    columns.
    """
    # Not `hash`, which differs between processes for text: a resumed run compares these digests.
    digest = xxhash.xxh64(repr((group.prompt.answer, group.prompt.extra)).encode())
    for t in group.trajectories:
        digest.update(repr((t.id, t.text, t.conversation, t.reward, t.turn_rewards)).encode())
    return digest.intdigest()
