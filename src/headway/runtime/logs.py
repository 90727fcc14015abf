"""A run's log files: standard logging under ``headway``, each line with its run and worker.

logging.getLogger("headway.…") ─▶ RUN/logs/driver.log          in the driver, and in workers of its process
                               └▶ RUN/logs/<role>-<rank>.log   in a worker's own process, with what it prints

2026-01-31 10:20:30,456 INFO run=first worker=actor-0 headway.cluster.role_host: build took 3.1 s
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s run=%(run)s worker=%(worker)s %(name)s: %(message)s"
DRIVER = "driver"


def log_to(handler: logging.Handler, run: str, worker: str) -> logging.Handler:
    """Write messages of Headway's loggers, from level INFO, by ``handler``. Returns it."""

    def named(record: logging.LogRecord) -> bool:
        record.run = run
        record.worker = getattr(record, "worker", worker)
        return True

    handler.setFormatter(logging.Formatter(FORMAT))
    handler.addFilter(named)
    logger = logging.getLogger("headway")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    return handler


def first_line(path: Path, text: str) -> str:
    """Return ``text`` as the first line of the log ``path`` of a run, which programs print to."""
    said = {"msg": text, "levelname": "INFO", "name": __name__, "run": path.parent.parent.name, "worker": path.stem}
    return logging.Formatter(FORMAT).format(logging.makeLogRecord(said)) + "\n"


class DriverLog:
    """The driver's log, ``driver.log`` in the folder ``logs``, open until `close`. A full disk does not end the run."""

    def __init__(self, logs: Path, run: str) -> None:
        with suppress(OSError):
            logs.mkdir(parents=True, exist_ok=True)
        self._handler = log_to(_Quiet(logs / "driver.log", delay=True), run, DRIVER)

    def close(self) -> None:
        logging.getLogger("headway").removeHandler(self._handler)
        self._handler.close()


class _Quiet(logging.FileHandler):
    """Handler of a file whose disk may be full."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Print nothing: the terminal belongs to the view."""
