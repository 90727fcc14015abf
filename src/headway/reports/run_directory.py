"""A run's directory: what lies where, made once, never shared by two runs, and trained in by one process at a time.

config.yaml    the resolved configuration       events.jsonl   everything that happened
metrics.jsonl  one row per version              summary.json   the run in one object
tensorboard/   checkpoints/   logs/             model/         the exported model
run.lock       held by the process that trains  initial_model/ the model that was made, where one was
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from headway.config.loading import dump
from headway.config.schema import Config
from headway.errors import UserError


class RunLock:
    """Held from `take` to `release`, or to the end of the process, however it ends.

    Without effect where the file system has no locks.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def take(self) -> None:
        """Raises `UserError`, naming who has it, when another process trains in the same directory."""
        file = self._path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise UserError(
                f"{self._path.parent}: {holder} trains this run right now. Wait for it to end, or stop it first"
            ) from None
        except OSError:  # a file system without locks
            file.close()
            return
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        self._file = file

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths inside a run's directory."""

    path: Path

    @classmethod
    def create(cls, path: Path, config: Config) -> RunDirectory:
        """Make the directory and write the resolved ``config`` into it.

        Raises `UserError` when it already holds a run or cannot be written.
        """
        run = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(file.exists() for file in (run.events, run.metrics, run.summary)):
                raise FileExistsError
            with run.config.open("x", encoding="utf-8") as file:  # of two runs that start at once, one gets here first
                file.write(dump(config))
            for folder in (run.tensorboard, run.checkpoints, run.logs):
                folder.mkdir(exist_ok=True)
        except FileExistsError as cause:
            raise UserError(_occupied(run)) from cause
        except OSError as cause:
            raise UserError(
                f"run.dir={path} cannot be written ({cause.strerror or cause}); give a run.dir that you may write to"
            ) from cause
        return run

    @classmethod
    def existing(cls, path: Path) -> RunDirectory:
        """The directory of a run that there is. Raises `UserError` when it holds none."""
        run = cls(path)
        wanted = "expected a run's directory, the run.dir of a headway train"
        if not path.is_dir():
            raise UserError(f"RUN: got {path}, which {'is a file' if path.exists() else 'does not exist'}; {wanted}")
        if missing := [file.name for file in (run.config, run.events) if not file.is_file()]:
            raise UserError(f"RUN: got {path}, which has no {missing[0]}; {wanted}")
        return run

    def write_config(self, config: Config) -> None:
        """Replace ``config.yaml`` in one step."""
        _replace(self.config, dump(config))

    @property
    def lock(self) -> Path:
        return self.path / "run.lock"

    @property
    def initial_model(self) -> Path:
        return self.path / "initial_model"

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def model(self) -> Path:
        return self.path / "model"

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Replace ``summary.json`` in one step: whoever reads it sees the old one or the new one, whole."""
        _replace(self.summary, json.dumps(summary, indent=2) + "\n")


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def _occupied(run: RunDirectory) -> str:
    if not run.path.is_dir():
        return f"run.dir={run.path} is a file; give the path of a directory, new or empty"
    return f"run.dir={run.path} already holds a run; give another run.dir, or remove that one first"
