"""Shared parts of all benchmarks: command lines, contenders in turns, runs of training, processes that answer."""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

K = TypeVar("K")
T = TypeVar("T")
Hear = Callable[[Mapping[str, Any]], None]
"""Function that takes what a process says beside its answers."""

DEMO = Path("recipes/demo.yaml")
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads that wait do not spin, as in Headway's own processes."""
RUN_S = 900.0
"""Most seconds of a run of training."""
LOOK_S = 1.0
"""Seconds after which a process that says nothing is looked at: it may have ended, and one that it forked live on."""
STOP_S = 40.0
"""Seconds for a run that was told to stop."""


class Failed(SystemExit):
    """A process has failed. Ends the benchmark with its last words, where it is not caught."""


class TimedOut(Failed):
    """Not over in time: a command that was told to stop, a worker that is gone."""


def parser(module: str, text: str | None, /, **options: Any) -> argparse.ArgumentParser:
    """Return the parser of ``python -m benchmarks.MODULE``; ``some_name=…`` is the option ``--some-name``.

    An option is a default value, False for a flag, or a dictionary of arguments for ``add_argument``.
    """
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, given in options.items():
        usual = {"action": "store_true"} if given is False else {"type": type(given), "default": given}
        option = given if isinstance(given, dict) else usual
        helped = {"help": "default: %(default)s", **option} if option.get("default") is not None else option
        made.add_argument(f"--{name.replace('_', '-')}", **helped)
    return made


def words(known: Iterable[str]) -> dict[str, Any]:
    """Return an option whose value is a list such as ``a,b``, of names that are ``known``; all of them by default."""
    names = [str(name) for name in known]

    def read(text: str) -> list[str]:
        if unknown := sorted(set(given := text.split(",")) - set(names)):
            raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; known: {', '.join(names)}")
        return given

    return {"type": read, "default": names, "help": f"of {','.join(names)}"}


def numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def say(text: str) -> None:
    """Print progress; standard output is for the tables."""
    print(text, file=sys.stderr, flush=True)


def turns(contenders: Mapping[K, T], rounds: int, seconds: float = float("inf")) -> Iterator[tuple[K, T]]:
    """Yield every contender once a round, so that a machine that slows down slows all of them down.

    No round but the first begins that would end later than ``seconds`` after the start.
    """
    start = time.monotonic()
    for done in range(rounds):
        spent = time.monotonic() - start
        if done and spent + spent / done > seconds:
            return
        yield from contenders.items()


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that ``work`` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process so far; 0 of one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_of_process() -> dict[str, int]:
    """Return the kernel's account of this process's memory, such as ``RssAnon`` and ``VmHWM``, in bytes."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {parts[0].rstrip(":"): int(parts[1]) * 1024 for parts in lines if len(parts) == 3 and parts[2] == "kB"}


# ------------------------------------------------------------------------------------------ runs of training


def train(directory: Path, *settings: str, recipe: Path = DEMO) -> Path:
    """Run ``headway train`` to its end in a process of its own; returns its run directory. Raises `Failed`."""
    call(sys.executable, "-m", "headway", "train", str(recipe), *settings, f"run.dir={directory}")
    return directory


def summary_of(run: Path) -> Any:
    return json.loads((run / "summary.json").read_text(encoding="utf-8"))


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def warmed_up_model(scratch: Path, *settings: str) -> Path:
    """Return the demo's model after warm-up; its run has to train something."""
    train(scratch / "model-run", *settings, "rollout.total_rollout_steps=64")
    return Path(shutil.copytree(scratch / "model-run" / "initial_model", scratch / "model"))


def call(*command: str, seconds: float = RUN_S) -> str:
    """Run ``command`` to its end and return its output.

    Raises:
        TimedOut: it was told to stop after ``seconds``, and has.
        Failed: in any other case.
    """
    process = subprocess.Popen(
        command,
        env={**PASSIVE, **os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except BaseException as error:  # told to stop, so that a run ends its workers
        process.send_signal(signal.SIGINT)
        try:
            output, _ = process.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        if process.returncode in (0, 128 + signal.SIGINT):
            raise TimedOut(f"{' '.join(command)}: not over after {seconds:g} s:\n{_last_lines(output)}") from None
    if process.returncode:
        raise Failed(f"{' '.join(command)} failed with exit code {process.returncode}:\n{_last_lines(output)}")
    return output


def _last_lines(output: str) -> str:
    return "\n".join(output.strip().splitlines()[-6:])


# ------------------------------------------------------------------------------------------ processes that answer


class Worker:
    """A process that answers questions, a line of JSON each. The next question starts one that has ended again.

    Its other output goes to ``log``. One that cannot be loaded is not started again, unless it is ``retried``.
    """

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] = PASSIVE, *, retried: bool = False
    ) -> None:
        self._command, self._log, self._environment, self._retried = command, log, environment, retried
        self._process: subprocess.Popen[bytes] | None = None
        self._unusable: str | None = None
        self._unread = b""
        log.unlink(missing_ok=True)

    def start(self, timeout_s: float = 180.0, hear: Hear = print) -> None:
        """Start the process if there is none, and wait until it is ready. Raises `Failed`."""
        if self._unusable is not None:
            raise Failed(self._unusable)
        if self._process is not None and self._process.poll() is None:
            return
        self.stop()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        environment, pipe, self._unread = {**os.environ, **self._environment}, subprocess.PIPE, b""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=environment, stdin=pipe, stdout=pipe, stderr=log, start_new_session=True
            )
        try:
            self._answer(timeout_s, hear)
        except Failed as error:
            self.stop()
            if not self._retried:
                self._unusable = f"not loaded: {error}"
            raise Failed(f"not loaded: {error}") from None

    def ask(self, question: Any, timeout_s: float, hear: Hear = print) -> Any:
        """Return the answer to ``question``; ``hear`` gets what the process says before. Raises `Failed`."""
        self.start(hear=hear)
        assert self._process is not None and self._process.stdin is not None
        with suppress(BrokenPipeError):  # the answer says why
            self._process.stdin.write(f"{json.dumps(question)}\n".encode())
            self._process.stdin.flush()
        return self._answer(timeout_s, hear)

    def _answer(self, timeout_s: float, hear: Hear) -> Any:
        process, deadline = self._process, time.monotonic() + timeout_s
        assert process is not None and process.stdout is not None
        while (left := deadline - time.monotonic()) > 0:
            readable = select.select([process.stdout], [], [], min(left, LOOK_S))[0]
            if not readable and process.poll() is None:
                continue
            if not (read := os.read(process.stdout.fileno(), 2**16) if readable else b""):
                self.stop()
                raise Failed(f"its process {_ended(process.returncode)}; {self.last_words()}")
            *lines, self._unread = (self._unread + read).split(b"\n")
            for said in map(json.loads, lines):
                if "error" in said:
                    raise Failed(said["error"])
                if "answer" in said:
                    return said["answer"]
                hear(said)
        self.stop(by_force=True)
        raise TimedOut(f"over {timeout_s:g} s")

    def last_words(self) -> str:
        """Say what the process printed last."""
        text = " ".join(self._log.read_text(errors="replace").split()) if self._log.exists() else ""
        return f"the last that it printed: {text[-200:] or 'nothing'}"

    def stop(self, *, by_force: bool = False) -> None:
        """End the process, and all that it started."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        if not by_force:
            with suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    known = -code in {one.value for one in signal.Signals}
    return f"was ended by {signal.Signals(-code).name if known else f'signal {-code}'}"


def serve(load: Callable[[Hear], Callable[[Any], Any]]) -> None:
    """Be a `Worker`'s process: ``load`` returns the function that answers a question. Ends with its input.

    ``load`` gets a function that says something else to who asked, before the answer.
    """
    # What libraries print goes to the log: the pipe is for answers alone.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(message: Mapping[str, Any]) -> None:
        print(json.dumps(message), file=answers)

    def tried(work: Callable[..., Any], *given: Any) -> Any:
        try:
            found = work(*given)
            said = {"answer": None if callable(found) else found}
        except Exception as error:
            traceback.print_exc()
            found, text = None, " ".join(str(error).split()).replace("|", "/")  # one line, for a table
            said = {"error": f"{type(error).__name__}: {text[:200]}"}
        say(said)
        return found

    answer = tried(load, say)
    for line in sys.stdin if answer else ():
        tried(answer, json.loads(line))
    answers.flush()
    os._exit(0)  # threads of the libraries would keep the process
