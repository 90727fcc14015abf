"""The driver's side of `rollout_worker`: start it, ask it, and end it when it does not answer."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.rollout_engines import VLLM_ENVIRONMENT
from benchmarks.rollout_workload import Cell, Setting
from headway.cluster.machine.worker_setup import math_environment

LOAD_S = 180.0
"""For an engine to be loaded and warmed up."""
STOP_S = 5.0
"""For a worker whose input ended."""


class WorkerFailed(Exception):
    """Why there is no measurement, in one line."""


class TimedOut(WorkerFailed):
    """No answer in time; the worker is gone."""


def environment(engine: str, threads: int) -> dict[str, str]:
    """Every engine's mathematics is set up alike, as Headway's own workers have it."""
    path = os.pathsep.join(["src", "."])
    extra = VLLM_ENVIRONMENT if engine == "vllm" else {}
    return {**os.environ, **math_environment(threads), **extra, "PYTHONPATH": path}


class Worker:
    """One engine's process. Loaded again by the next question after it had to be ended."""

    def __init__(self, engine: str, command: Sequence[str], threads: int, log: Path) -> None:
        """``command`` is a process that speaks as `rollout_worker` does; what else it prints goes to ``log``."""
        self.engine = engine
        self._command = command
        self._threads = threads
        self._log = log
        self._process: subprocess.Popen[str] | None = None
        self._unloadable: str | None = None

    def load(self) -> None:
        """Start the process if there is none. Raises `WorkerFailed`, at once if it could not be loaded before."""
        if self._unloadable is not None:
            raise WorkerFailed(self._unloadable)
        if self._process is not None:
            return
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                self._command,
                env=environment(self.engine, self._threads),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        try:
            self._answer(LOAD_S, "load")
        except WorkerFailed as error:
            self.stop()
            self._unloadable = f"not loaded: {error}"
            raise WorkerFailed(self._unloadable) from None

    def run(self, cell: Cell, timeout_s: float) -> dict[str, float]:
        """``tokens``, ``seconds`` and ``cpu_seconds`` of one run. Raises `WorkerFailed`."""
        self.load()
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(cell.to_json()) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        return self._answer(timeout_s, "answer")

    def _answer(self, timeout_s: float, doing: str) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        if not ready:
            self.stop(by_force=True)
            raise TimedOut(f"did not {doing} within {timeout_s:g} s")
        line = self._process.stdout.readline()  # written at once: the rest of it is there
        if not line:
            raise self._died()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerFailed(answer["error"])
        return answer

    def _died(self) -> WorkerFailed:
        self.stop()
        lines = self._log.read_text(errors="replace").strip().splitlines() or ["nothing"]
        return WorkerFailed(f"its process ended; the last that it printed: {lines[-1][:200]}")

    def stop(self, *, by_force: bool = False) -> None:
        """End the process and all that it started."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        if not by_force:
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


class Workers:
    """Those of one setting; loaded one after the other, ended together."""

    def __init__(self, pythons: Mapping[str, Path], folder: Path, setting: Setting, logs: Path) -> None:
        self._workers = [worker(engine, python, folder, setting, logs) for engine, python in pythons.items()]

    def __enter__(self) -> list[Worker]:
        for one in self._workers:
            start = time.monotonic()
            try:
                one.load()
            except WorkerFailed as error:
                print(f"{one.engine}: {error}", file=sys.stderr, flush=True)
            except BaseException:
                self._stop()
                raise
            else:
                print(f"{one.engine}: loaded in {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
        return self._workers

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        for one in self._workers:
            one.stop()


def worker(engine: str, python: Path, folder: Path, setting: Setting, logs: Path) -> Worker:
    arguments = [engine, str(folder), json.dumps(asdict(setting))]
    command = [str(python), "-m", "benchmarks.rollout_worker", *arguments]
    return Worker(engine, command, setting.threads, logs / f"{engine}.log")
