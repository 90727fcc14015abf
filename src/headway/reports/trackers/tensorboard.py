"""Tracker for TensorBoard: all numbers of a metrics row as scalars, in its own format, without torch or TensorFlow.

Which numbers a row has is up to `headway.reports.metrics.version_row`. Settings, samples and the summary are
texts in the same file.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headway.errors import writable
from headway.reports.trackers.tracker import Tracker, TrackerSetting, markdown, scalars

_NUMBER = count()
"""Numbers the files that this process opens. Padded in a name, since readers go through the files by their names."""


class TensorBoardTracker(Tracker):
    """Tracker for TensorBoard: a file beside the run's folder of trackers. A point's step is the version.

    After a failed write it continues in another file, since the first may end with half a record.
    """

    entry = "tensorboard"

    def __init__(self, setting: TrackerSetting) -> None:
        """Open a file. Points from version ``setting.undone_from`` on are removed from earlier files. If the rows in
        these are unknown, all their points are removed, since all rows are sent again.
        """
        self._directory = setting.folder.with_name("tensorboard")
        self._directory.mkdir(exist_ok=True)  # it may have been removed before a resume
        self._begins_with = setting.undone_from or 0
        if setting.undone_from is not None:
            # Only for TensorBoard: W&B, MLflow and trackio delete no rows, and there the later row counts.
            _purge(self._directory, setting.undone_from if setting.entry else 0)
        self._records: _Records | None = _Records(self._directory)
        self._version = 0

    def on_settings(self, config: dict[str, Any]) -> None:
        self._write(lambda file: file.add_text(self._begins_with, "settings", _as_code(config)))

    def on_row(self, row: dict[str, Any]) -> None:
        self._version = max(self._version, row["version"])
        self._write(lambda file: file.add_scalars(row["version"], scalars(row)))

    def on_sample(self, rows: list[dict[str, Any]]) -> None:
        self._write(lambda file: file.add_text(rows[0]["version"], f"samples/{rows[0]['kind']}", markdown(rows)))

    def on_summary(self, summary: dict[str, Any]) -> None:
        self._write(lambda file: file.add_text(self._version, "summary", _as_code(summary)))

    def close(self, status: str) -> None:
        self._write(_Records.close)

    def _write(self, action: Callable[[_Records], None]) -> None:
        # None while it writes: after a failure the file may end in half a record, and readers stop there.
        file, self._records = self._records or _Records(self._directory), None
        action(file)
        self._records = file


class _Records:
    """One file of TensorBoard's events.

    TensorBoard's own `EventFileWriter` writes in a thread, which prints a traceback if the disk is full. Here every
    method raises `OSError` to its caller.
    """

    def __init__(self, directory: Path) -> None:
        # Slow to import, and not needed where TensorBoard is switched off.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_TENSOR, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event = Event
        texts = SummaryMetadata.PluginData(plugin_name="text")
        self._is_text = SummaryMetadata(plugin_data=texts, data_class=DATA_CLASS_TENSOR)
        self._string = partial(TensorProto, dtype=DT_STRING)
        # Numbered with leading zeros: TensorBoard reads files by name, and files of one second came in a wrong order.
        opened = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBER):06d}"
        self._writer = RecordWriter((directory / f"events.out.tfevents.{opened}").open("xb"))
        self.write(self._event(wall_time=time.time(), file_version="brain.Event:2"))
        self._writer.flush()

    def add_scalars(self, step: int, values: dict[str, float | int]) -> None:
        """Write one event with all ``values``; it is on the disk when this returns."""
        event = self._event(wall_time=time.time(), step=step)
        for name, value in values.items():
            event.summary.value.add(tag=name, simple_value=value)  # a format that every reader of these files knows
        self.write(event)
        self._writer.flush()

    def add_text(self, step: int, name: str, text: str) -> None:
        """Write one text, which TensorBoard shows as Markdown; it is on the disk when this returns."""
        event = self._event(wall_time=time.time(), step=step)
        event.summary.value.add(
            tag=name, tensor=self._string(string_val=[writable(text).encode()]), metadata=self._is_text
        )
        self.write(event)
        self._writer.flush()

    def write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())

    def close(self) -> None:
        self._writer.close()


def _purge(directory: Path, step: int) -> None:
    """Replace the files by one with all points before ``step``, as they were written.

    TensorBoard has an event for that (``SessionLog.START``); its Python reader shows the points all the same.
    """
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    earlier = sorted(directory.glob("*tfevents*"))
    with TemporaryDirectory(prefix=".purging-", dir=directory) as aside:
        records = _Records(Path(aside))
        for file in earlier:
            for event in map(Event.FromString, RawEventFileLoader(str(file)).Load()):
                if event.HasField("summary") and event.step < step:
                    records.write(event)
        records.close()
        (kept,) = Path(aside).iterdir()
        # Before the others are removed: a kill in between leaves points twice, and loses none.
        kept.rename(directory / kept.name)
    for file in earlier:
        file.unlink()


def _as_code(values: dict[str, Any]) -> str:
    """Return ``values`` as a block of JSON, which TensorBoard shows as it is."""
    return f"```json\n{json.dumps(values, indent=1, default=str)}\n```"
