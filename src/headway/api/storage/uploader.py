"""Upload of a run to its storage, in a thread: each pass sends what changed in the run's directory since the last.

    run.json                      the writing process, and the pieces of each file of the record
    pieces/EPOCH-NUMBER           bytes of the record, the journal and the initial model; never changed
    checkpoints/version_N/, model/    as in the run's directory; state.json, headway.json last

The directory itself is the queue: a failed pass is repeated, and keeps no list of outstanding files. A reader sees the
record as it was when ``run.json`` was written. It sees a checkpoint once its ``state.json`` is there, which is sent
after the record that mentions the checkpoint, and after the sizes of its other files were compared.

A growing file is sent in pieces. A new piece is merged with preceding pieces that are no larger, so that a file of any
length has few pieces.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from pathlib import Path
from threading import Condition, Thread

from headway.api.storage.storage_client import StorageClient
from headway.api.storage.stored_run import RUN_FILE, Files, Ownership, claim, complete_versions, left_over
from headway.config.schema import Config
from headway.config.sizing.placement import needs_critic
from headway.config.sizing.timeouts import STORAGE_AT_END_S, STORAGE_BYTES_PER_S, STORAGE_LEFT_S
from headway.engines.train.state_file import STATE_FILE
from headway.errors import UserError, said_by
from headway.events import CheckpointSaved, Event, Note, RunStarted, StorageReached
from headway.reports.checkpoint_folders import FILE, Checkpoints
from headway.reports.report_manager import Reports

log = logging.getLogger(__name__)

GROWING = ("journal/*.*.*", "metrics.jsonl", "samples.jsonl", "tensorboard/**/*")
"""Append-only files, beside ``events.jsonl``."""
REPLACED = (
    "config.yaml",
    "summary.json",
    "journal/settings.json",
    "journal/given-up-*",
    "events/*[0-9].state",
    "initial_model/**/*",
    "code/**/*",
    "trackers/*.json",
)
"""Files that are replaced as a whole."""
PIECE = 64 * 2**20
"""Maximum bytes of a piece."""
PIECES = "pieces"
EVERY_S = 30.0
"""Seconds between two uploads of record and journal: so much is lost with the run's directory."""
LONGEST_PAUSE_S = 60.0
"""Maximum seconds from a failed pass to the next one."""


class _Moved(Exception):
    """Raised when a file was replaced while it was read."""


class StorageUploader:
    """Observer that uploads a run's finished files to its storage."""

    def __init__(self, store: StorageClient, reports: Reports, config: Config, start: int | None) -> None:
        """Set up. ``start``: version of the checkpoint that a resumed run starts from; else None."""
        self.sending: int | None = None
        """Version of the checkpoint that is being sent, and must not be removed; None if none."""
        self._store, self._reports, self._directory, self._start = store, reports, reports.directory, start
        self._own: Ownership | None = None
        self._checkpoints, self._critic = Checkpoints(reports.directory.checkpoints), needs_critic(config)
        self._keep = config.trainer.max_actor_ckpt_to_keep
        self._every_s, self._end_s = EVERY_S, STORAGE_AT_END_S
        self._files: Files = {}
        """File of the record → the name and the bytes of each of its pieces."""
        self._manifest: bytes | None = None
        """Content of ``run.json`` as this process last wrote it; None before."""
        self._marks: dict[str, tuple[int, int]] = {}
        """File that was sent whole → its size and modification time."""
        self._obsolete: list[str] = []
        self._number = 0
        self._version: int | None = None
        self._failures = 0
        self._reason: str | None = None
        self._over = False
        """True once another process has taken over the run."""
        self._turn = Condition()
        self._asked = self._done = 0
        """Numbers of the last requested pass, and of the last pass that sent everything."""
        self._thread = Thread(target=self._work, name="headway-storage", daemon=True)

    def on_event(self, event: Event) -> None:
        if isinstance(event, RunStarted) and self._thread.ident is None:
            self._thread.start()
        elif isinstance(event, CheckpointSaved):
            self._ask()

    def close(self) -> None:
        """Do nothing: the thread ends with the process, and `finish` waits for its uploads."""

    def finish(self) -> None:
        """Wait until everything is uploaded, for `STORAGE_AT_END_S` and one second per MB; report what is missing. Does
        nothing before training began.
        """
        if self._thread.ident is None:
            return
        nbytes = sum(path.stat().st_size for path in self._directory.path.glob("[cm]*/**/*") if path.is_file())
        limit = self._end_s + nbytes / STORAGE_BYTES_PER_S
        if not self._flush(limit):
            self._tell(
                f"not everything is there at the run's end: {self._reason or f'it is slow: {limit:.0f} s are over'}"
            )

    def leave(self) -> None:
        """Shorten the wait of `finish_record`, for a user who leaves at once."""
        self._end_s = STORAGE_LEFT_S

    def finish_record(self) -> None:
        """Wait until the closed reports are uploaded, too. Logs a warning if they are not."""
        if self._thread.ident is not None and not self._flush(self._end_s if self._reason is None else 0.0):
            log.warning(
                "%s lacks the end of the run's record; it is whole in %s", self._store.url, self._directory.path
            )

    # ------------------------------------------------------------------------------------------------ thread

    def _ask(self) -> int:
        with self._turn:
            self._asked += 1
            self._turn.notify_all()
            return self._asked

    def _flush(self, limit_s: float) -> bool:
        """Ask for a pass, and tell whether it sent everything within ``limit_s``."""
        asked = self._ask()
        with self._turn:
            self._turn.wait_for(lambda: self._done >= asked or self._over, limit_s)
            return self._done >= asked

    def _work(self) -> None:
        pause: float
        while True:
            # Before the pass: a request during the pass needs another one
            asked = self._asked
            try:
                self.send_changes()
            except _Moved:
                pause = 0.1
            except UserError as why:
                self._tell(str(why))
                with self._turn:
                    self._over = True
                    self._turn.notify_all()
                return
            except Exception as cause:
                self._failures += 1
                pause = min(2.0**self._failures, LONGEST_PAUSE_S)
                self._tell(said_by(cause))
            else:
                self._failures, pause = 0, self._every_s
                self._tell(None)
                with self._turn:
                    self._done = asked
                    self._turn.notify_all()
            with self._turn:
                self._turn.wait_for(lambda asked=asked: self._asked > asked, pause)  # type: ignore[misc]

    def _tell(self, reason: str | None, version: int | None = None) -> None:
        """Report a change: an uploaded checkpoint's ``version``, or the ``reason`` of a failure; None: all is well."""
        if version is None and reason == self._reason:
            return
        changed = (reason is None) != (self._reason is None)
        self._reason, self._version = reason, self._version if version is None else version
        # A report after the record was closed once ended this thread.
        with suppress(ValueError):  # the record is closed already
            if changed:
                has = "has everything again" if reason is None else f"lacks what was closed last: {reason}"
                level = "info" if reason is None else "warning"
                text = f"run.storage={self._store.url} {has}"
                self._reports.emit(Note(time=time.monotonic(), level=level, text=text))
            self._reports.emit(StorageReached(time=time.monotonic(), version=self._version, reason=reason))

    def send_changes(self) -> None:
        """Make one pass. Raises the storage's errors, and `UserError` if another process has taken over the storage."""
        if self._own is None:
            self._own = claim(self._store, self._directory, self._start)
        elif not self._own.check(self._store):
            self._manifest = None
        # A checkpoint can be resumed from only if the record on the disk has its boundary.
        saved = [v for v in self._checkpoints.complete(with_critic=self._critic) if v <= self._reports.resumable]
        # Before the checkpoints: the stored record must mention each of them.
        self._send_record(self._own)
        if saved:
            self._send_checkpoints(saved)
        if self._directory.model.is_dir():
            last = FILE if (self._directory.model / FILE).is_file() else "config.json"
            self._send_folder(self._directory.model, last)

    # ------------------------------------------------------------------------------------------------ record

    def _send_record(self, own: Ownership) -> None:
        events = self._directory.events
        told = events.stat().st_size  # first: the other files, read later, have all that these events need
        files = {path: True for pattern in GROWING for path in self._directory.path.glob(pattern) if path.is_file()}
        files |= {path: False for pattern in REPLACED for path in self._directory.path.glob(pattern) if path.is_file()}
        names = {path.relative_to(self._directory.path).as_posix() for path in (*files, events)}
        for path, grows in files.items():
            self._send_file(path, None, own.epoch, grows=grows)
        self._send_file(events, told, own.epoch, grows=True)
        for name in [name for name in self._files if name not in names]:
            self._obsolete += [piece for piece, _ in self._files.pop(name)]
        if (manifest := own.manifest(self._files)) != self._manifest:
            own.check(self._store)  # again: pieces take long, and this process may have been suspended
            self._store.put(RUN_FILE, manifest)
            if self._manifest is None:  # what earlier processes of the run have left
                used = {piece for pieces in self._files.values() for piece, _ in pieces}
                self._obsolete = [name for name in self._store.sizes(PIECES) if name not in used]
            self._manifest = manifest
        self._store.remove(self._obsolete)  # only now: the previous run.json names them
        self._obsolete.clear()

    def _send_file(self, path: Path, size: int | None, epoch: int, *, grows: bool) -> None:
        """Send the new part of a file, up to ``size`` bytes. Raises `_Moved` if the file was replaced meanwhile."""
        name = path.relative_to(self._directory.path).as_posix()
        try:
            mark = _mark(path)
            size = mark[0] if size is None else size
            pieces = self._files.get(name)
            there = sum(nbytes for _, nbytes in pieces or ())
            # A shorter file was replaced: a resumed run truncates its record
            if pieces is None or there > size or (not grows and self._marks.get(name) != mark):
                self._obsolete += [piece for piece, _ in pieces or ()]
                pieces = self._files[name] = []
                there = 0
            with path.open("rb") as file:
                while there < size:
                    end = min(there + PIECE, size)
                    while pieces and pieces[-1][1] <= end - there and end - there + pieces[-1][1] <= PIECE:
                        piece, nbytes = pieces.pop()
                        self._obsolete.append(piece)
                        there -= nbytes
                    file.seek(there)
                    if len(data := file.read(end - there)) < end - there:
                        raise _Moved
                    self._number += 1
                    piece = f"{PIECES}/{epoch}-{self._number}"
                    self._store.put(piece, data)
                    pieces.append((piece, len(data)))
                    there = end
            # A replacement between two reads would mix pieces of two files
            if not grows and _mark(path) != mark:
                raise _Moved
        except FileNotFoundError:
            if path.exists():
                raise
            raise _Moved from None
        self._marks[name] = mark

    # ------------------------------------------------------------------------------------------------ folders

    def _send_checkpoints(self, saved: list[int]) -> None:
        """Send the kept checkpoints, the newest first, and remove the others."""
        complete = complete_versions(self._store.sizes("checkpoints"))
        if (newest := max(complete, default=None)) is not None and newest != self._version:
            self._tell(self._reason, newest)  # the storage had it when this process resumed the run
        kept = sorted({*complete, *saved})[-self._keep if self._keep else 0 :]
        for version in [version for version in reversed(saved) if version in kept and version not in complete]:
            self.sending = version
            try:
                if self._critic:
                    self._send_folder(self._checkpoints.critic(version), STATE_FILE)
                if not self._send_folder(self._checkpoints.actor(version), STATE_FILE):
                    continue
            finally:
                self.sending = None
            self._tell(None, max(version, self._version or 0))
        there = self._store.sizes("checkpoints")
        if saved[-1] in complete_versions(there):
            self._store.remove(left_over(there, lambda version: version in kept))

    def _send_folder(self, folder: Path, last: str) -> bool:
        """Send a folder's files, and ``last``, which marks it complete, at the end. Returns whether they stayed."""
        below = folder.relative_to(self._directory.path).as_posix()
        try:
            files = sorted(folder.iterdir(), key=lambda file: file.name == last)
            marks = {f"{below}/{file.name}": _mark(file) for file in files}
            if all(self._marks.get(name) == mark for name, mark in marks.items()):
                return True
            # Before the removal: if that fails, the file is sent again.
            self._marks.pop(f"{below}/{last}", None)
            # First: a reader takes a folder with this file as complete
            self._store.remove([f"{below}/{last}"])
            there = self._store.sizes(below)
            for name, mark in marks.items():
                if name == f"{below}/{last}":
                    there = self._store.sizes(below)
                    for other, (size, _) in marks.items():
                        if other != name and there.get(other) != size:
                            self._marks.pop(other, None)
                            raise OSError(f"{other} has {there.get(other, 0)} bytes there, of {size}")
                if self._marks.get(name) != mark or there.get(name) != mark[0]:
                    self._store.send(self._directory.path / name, name)
                    self._marks[name] = mark
        except FileNotFoundError:
            if folder.exists():
                raise
            return False  # removed meanwhile, as retention no longer needs it
        return True


def _mark(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns
