"""Saved metrics of a large run at its newest boundaries, from which readers start.

    RunMetrics at version.reached ─▶ events/000042.state ─▶ a reader reads the events behind that boundary

A state is only a shortcut: one that other code wrote, or that fits no boundary of the surviving history, is ignored,
and all events are read.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from headway.errors import said_by
from headway.events import VersionReached
from headway.reports.checkpoint_folders import Checkpoints
from headway.reports.metrics.run_metrics import RowSink, RunMetrics
from headway.reports.record.events_file import SurvivingRecord
from headway.reports.run_directory import RunDirectory

LARGE = 2**20
"""Minimum bytes of a record for states to be kept."""
MOST_WAITING = 8
"""Maximum number of states that wait for the disk."""
SUFFIX = ".state"
KEPT = 4
"""Number of newest states that are kept, beside those of versions that have a checkpoint."""
PARTS = ("run_metrics", "group_tally", "occupancy", "version_row", "run_sums", "intervals")
MODULES = frozenset({"headway.events", *(f"headway.reports.metrics.{name}" for name in PARTS)})
"""Modules of the classes in a state, beside those of `OTHERS`."""
OTHERS = frozenset(
    {
        *(("collections", name) for name in ("Counter", "deque", "defaultdict")),
        *(("builtins", name) for name in ("int", "float", "list", "dict", "set")),
    }
)


@dataclass(frozen=True, slots=True)
class MetricsState:
    """A run's metrics at a boundary; by default before its first event."""

    metrics: RunMetrics
    offset: int = 0
    """Number of bytes of ``events.jsonl`` up to the boundary."""
    time: float = 0.0
    """Time of the boundary on the event clock."""


class MetricsStates:
    """Saved states of a run's metrics: each is copied at its boundary, and written in a thread.

    While `MOST_WAITING` states wait for a slow disk, further ones are left out, so that the run need not wait.
    """

    def __init__(self, run: RunDirectory, warn: Callable[[str], None]) -> None:
        self._run = run
        self._warn = warn
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="metrics-state")
        self._saving: deque[Future[None]] = deque()
        """Pending write of each state, the oldest first."""
        self._failed = False

    def keep(self, metrics: RunMetrics, event: VersionReached, offset: int) -> None:
        """Keep ``metrics`` at the boundary ``event``, which ends at ``offset`` of the record."""
        self._look()
        # Several: with only one, a fast run kept just its first state.
        if len(self._saving) >= MOST_WAITING:
            return
        try:
            state = pickled(metrics)
        except Exception as cause:  # no fault of the run's
            self._fail(cause)
            return
        self._saving.append(self._thread.submit(save, self._run, state, event.version, offset, event.time))

    def close(self) -> None:
        self._thread.shutdown()
        self._look()

    def _look(self) -> None:
        while self._saving and self._saving[0].done():
            if (cause := self._saving.popleft().exception()) is not None:
                self._fail(cause)

    def _fail(self, cause: BaseException) -> None:
        if not self._failed:
            self._warn(
                "no state of the metrics was kept: reports and a resume of this run read more events, and take longer: "
                + said_by(cause)
            )
        self._failed = True


def pickled(metrics: RunMetrics) -> bytes:
    """Return the state of ``metrics``, for `save`: a copy, which takes milliseconds."""
    # Sinks hold files, threads and the terminal, which no copy can have.
    sinks, metrics.sinks = metrics.sinks, []
    try:
        return pickle.dumps(metrics, protocol=5)
    finally:
        metrics.sinks = sinks


def save(run: RunDirectory, state: bytes, version: int, offset: int, time: float) -> None:
    """Keep a ``state`` at the boundary of ``version``, in one step. Any thread may do so. Raises `OSError`."""
    folder = run.states
    folder.mkdir(exist_ok=True)
    draft = folder / f"{version:06d}.state-tmp"
    header = json.dumps({"code": _code(), "offset": offset, "time": time}).encode()
    draft.write_bytes(header + b"\n" + zlib.compress(state, 1))
    draft.replace(draft.with_suffix(SUFFIX))
    checkpoints = Checkpoints(run.checkpoints)
    # Of a history that a resume undid: at the same offset it would fit a boundary of the new one.
    undone = [path for path in _states(run) if int(path.stem) > version]
    older = [path for path in _states(run)[len(undone) + KEPT :] if not checkpoints.actor(int(path.stem)).is_dir()]
    for path in undone + older:
        path.unlink(missing_ok=True)


def newest(run: RunDirectory, record: SurvivingRecord, sink: RowSink, until: int | None = None) -> MetricsState:
    """Return the newest usable state of the surviving history, not after the boundary of ``until``.

    ``sink`` gets the state's metrics rows, and later ones.
    """
    for path in _states(run):
        version = int(path.stem)
        if version in record.boundaries and (until is None or version <= until):
            with suppress(Exception):  # which a damaged state may raise of any kind
                if (state := _load(run, path, record.boundaries[version], sink)) is not None:
                    return state
    return MetricsState(RunMetrics([sink]))


def _states(run: RunDirectory) -> list[Path]:
    """Return the files of states, newest first."""
    return sorted(run.states.glob(f"*[0-9]{SUFFIX}"), key=lambda path: -int(path.stem))


def _load(run: RunDirectory, path: Path, offset: int, sink: RowSink) -> MetricsState | None:
    header, _, state = path.read_bytes().partition(b"\n")
    told = json.loads(header)
    if told["code"] != _code() or told["offset"] != offset:
        return None
    metrics = _Unpickler(io.BytesIO(zlib.decompress(state))).load()
    with run.metrics.open("rb") as file:
        rows = tuple(json.loads(text) for text, _ in zip(file, range(metrics.rows), strict=False))
    if len(rows) != metrics.rows:
        return None
    for row in rows:
        sink.on_row(row)
    metrics.sinks = [sink]
    return MetricsState(metrics, offset, told["time"])


class _Unpickler(pickle.Unpickler):
    """Unpickler for only the classes of a state: a run's directory may come from an untrusted place."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(import_module(module), name) if module in MODULES or (module, name) in OTHERS else None
        # Only the module's own classes: by the names that it imports a state could reach anything.
        if not isinstance(found, type) or found.__module__ != module:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a state")
        return found


@cache
def _code() -> str:
    """Return a digest of the code that makes states, to detect states of other code."""
    digest = hashlib.sha256()
    for name in sorted(MODULES):
        digest.update(Path(str(import_module(name).__file__)).read_bytes())
    return digest.hexdigest()
