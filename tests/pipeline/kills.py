"""Runs that are killed at any moment and resumed, again and again, and what is left of their history.

Everything here is counted from events, by rules of the test's own: what survives, what was admitted, what it became.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import floor
from typing import Any

from headway.events import (
    Event,
    GroupAdmitted,
    GroupSettled,
    RunFinished,
    RunResumed,
    RunStarted,
    TrajectoryFinished,
    UpdatePhase,
    VersionReached,
)
from tests.pipeline.scenario import Run, Scenario

COMES_BACK = {"resume"}
"""Reasons for which a group is dropped and its prompt comes back in another one, without replicas that are lost."""


@dataclass(slots=True)
class Killed:
    """A run in several processes, of which only the last one came to its end."""

    scenario: Scenario
    record: list[Event] = field(default_factory=list)
    """All that was told, with a `RunResumed` where a checkpoint was gone back to."""
    resumed: list[int] = field(default_factory=list)
    """The versions that were gone back to."""
    last: Run | None = None

    @property
    def surviving(self) -> list[Event]:
        """Event by event: on the way back everything behind the boundary is thrown away."""
        kept: list[Event] = []
        for event in self.record:
            if isinstance(event, RunResumed):
                while not (isinstance(kept[-1], VersionReached) and kept[-1].version == event.version):
                    kept.pop()
            kept.append(event)
        return kept


def run_with_kills(
    scenario: Scenario,
    kills: Sequence[float],
    changes: Sequence[dict[str, Any]] = (),
    between: Callable[[], object] = lambda: None,
) -> Killed:
    """``kills``: seconds after which each process but the last is killed; without a checkpoint or a journal the run
    starts over. ``changes``: what of the scenario is another thing in each process behind the first. ``between`` is
    called after each kill.
    """
    whole = Killed(scenario)
    saved: dict[str, Any] | None = None
    for kill, change in zip_longest([*kills, None], [{}, *changes]):
        process = replace(scenario, resume_from=saved, **(change or {}))
        run = process.run(cancelled_at=kill)
        if saved is None:
            whole.record = []
        else:
            whole.resumed.append(saved["version"])
            whole.record.append(RunResumed(time=0.0, version=saved["version"], times=len(whole.resumed)))
        whole.record += run.events
        whole.last = run
        assert run.tasks_left == []
        if run.cancelled_at is None:
            if run.error is not None:
                raise run.error
            break  # it was faster than its end
        for state in [*run.starts, *(taken for _, taken in run.trainer.saved)][-1:]:
            saved = json.loads(json.dumps(state))
        between()
    return whole


def check_history(whole: Killed) -> Killed:
    """Nothing lost, nothing twice, and never more ahead than the inequality allows, whatever was killed when."""
    history = whole.surviving
    scenario, config = whole.scenario, whole.scenario.config
    b, eta = config.groups_per_version, config.async_training.staleness_threshold
    admissions: dict[int, GroupAdmitted] = {}
    fates: dict[int, GroupSettled] = {}
    taken = _taken(history)
    loaded: dict[str, int] = {}
    since, discarded = 0, 0
    due: list[GroupAdmitted] = []
    """Whose prompts come back next. With a journal none do: groups that were open go on under their numbers."""
    for event in history:
        match event:
            case RunResumed():
                since = event.version
                if scenario.journal is None:
                    due += [admissions[number] for number in sorted(admissions.keys() - fates.keys())]
            case RunStarted():
                loaded = dict.fromkeys(event.slots, 0)
            case UpdatePhase(phase="load") if event.where in loaded:
                loaded[event.where] = event.version
            case GroupAdmitted():
                assert event.number == len(admissions), "numbers go on"
                served = min(loaded.values())
                assert served >= since, "admitted before the checkpoint's weights were served"
                limit = floor((served + 1 + eta) * b)
                assert len(admissions) + 1 - discarded <= limit
                assert (event.version, event.limit) == (served, limit)
                admissions[event.number] = event
                if due:
                    back = due.pop(0)
                    assert (event.epoch, event.row, event.attempt) == (back.epoch, back.row, back.attempt + 1)
                else:
                    assert event.attempt == 0
            case GroupSettled(fate="in_flight"):
                raise AssertionError(f"group {event.number} survived without a fate")
            case GroupSettled():
                assert event.number in admissions and event.number not in fates
                fates[event.number] = event
                discarded += event.number not in taken
            case TrajectoryFinished():
                assert all(version >= since for _, version in event.version_spans), (
                    "sampled by weights that were undone"
                )
    _check_rows(scenario, admissions, fates)
    assert whole.last is not None
    finished = whole.last.of(RunFinished)[-1]
    assert finished.groups == {"admitted": len(admissions), **_counts(fates), "in_flight": 0}
    return whole


def _taken(history: Sequence[Event]) -> set[int]:
    return {number for event in history for number in getattr(event, "numbers", [])}


def _counts(fates: dict[int, GroupSettled]) -> dict[str, int]:
    counts = Counter(event.fate for event in fates.values())
    return {fate: counts[fate] for fate in ("trained", "filtered", "dropped", "failed")}


def _check_rows(scenario: Scenario, admissions: dict[int, GroupAdmitted], fates: dict[int, GroupSettled]) -> None:
    """Each row ends once, in its last attempt; where data are the run's length, each row of each epoch does."""
    assert admissions.keys() == fates.keys()
    attempts: dict[tuple[int, int], list[int]] = defaultdict(list)
    ended: Counter[tuple[int, int]] = Counter()
    for number, event in admissions.items():
        row = event.epoch, event.row
        attempts[row].append(event.attempt)
        ended[row] += fates[number].reason not in COMES_BACK
    assert all(tries == list(range(len(tries))) for tries in attempts.values()), "attempts follow each other"
    if scenario.epochs is not None:
        every = {(epoch, row) for epoch in range(scenario.epochs) for row in range(scenario.rows)}
        assert attempts.keys() == every, "a row was lost"
        assert set(ended.values()) == {1}
    else:
        assert max(ended.values(), default=1) == 1, "a row was trained twice"
        trained = sum(event.fate == "trained" or event.reason == "nonfinite" for event in fates.values())
        assert trained == scenario.config.rollout.total_rollout_steps
