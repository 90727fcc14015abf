"""The driver's log: the few events of a run that somebody who looks for a cause reads, as lines of standard logging."""

from __future__ import annotations

import logging
from pathlib import Path

from headway.events import (
    CheckpointSaved,
    EpisodeWorkerLost,
    Event,
    Note,
    ReplicaJoined,
    ReplicaLost,
    RunFinished,
    RunResumed,
    RunStarted,
    UpdateRetried,
    VersionReached,
)
from headway.runtime.logs import DriverLog

logger = logging.getLogger(__name__)
WARNINGS = (ReplicaLost, EpisodeWorkerLost, UpdateRetried)
TOLD = (RunStarted, RunResumed, VersionReached, CheckpointSaved, ReplicaJoined, RunFinished)


class EventLog:
    """An observer that logs events to ``driver.log`` in the folder ``logs`` of the run's directory ``run``."""

    def __init__(self, run: Path) -> None:
        self._log = DriverLog(run / "logs", run.resolve().name)

    def on_event(self, event: Event) -> None:
        match event:
            case Note(level=level, text=text):
                logger.log(logging.INFO if level == "info" else logging.WARNING, text)
            case RunFinished(status="failed"):
                logger.error("%s", event)
            case _ if isinstance(event, WARNINGS):
                logger.warning("%s", event)
            case _ if isinstance(event, TOLD):
                logger.info("%s", event)

    def close(self) -> None:
        """Leave the log open: what fails as the run ends is logged, too. See `end`."""

    def end(self) -> None:
        """Close the log."""
        self._log.close()
