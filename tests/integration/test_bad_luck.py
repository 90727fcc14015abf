"""What goes wrong while a run is under way ends in one message and one exit code, and nothing is left behind."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import typer

from headway.api.interrupts import Interrupts
from headway.api.run import train
from headway.api.run import training_run as app_run
from headway.cli.common import errors_as_messages
from headway.cli.train_command import load_checked
from headway.cluster.worker_engines import TrainGroup
from headway.engines.train.fsdp import checkpoint, learner
from headway.errors import RunError, StallError
from headway.events import Event, Note
from headway.reports.report_manager import Reports
from headway.runtime.process_tree import descendants
from headway.runtime.signals import terminations_as_interrupts
from tests.full_disk import small_disk
from tests.integration import support
from tests.integration.support import START_S, alive, events, finish, run_here, start, summary, wait_for
from tests.integration.test_on_policy import weights

DEMO = Path(__file__).parents[2] / "recipes" / "demo.yaml"
SHORT = ("rollout.total_rollout_steps=4", "rollout.test_freq=-1", "reward.function=task")
"""One version, scored without a process and never validated."""


def inline(recipe: Path, run_dir: Path, *overrides: str) -> tuple[str, ...]:
    """Arguments of ``headway``."""
    return "train", str(recipe), "cluster.backend=inline", *overrides, f"run.dir={run_dir}"


# ---------------------------------------------------------------------------------------- signals, in this process


class Listener:
    """Takes notes, and stop requests."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def emit(self, event: Event) -> None:
        assert isinstance(event, Note)
        self.heard.append(event.text)

    def request_stop(self) -> None:
        self.heard.append("request_stop")


async def signalled(*numbers: signal.Signals) -> None:
    """Send them to this process, one by one, and let the event loop handle each."""
    for number in numbers:
        os.kill(os.getpid(), number)
        await asyncio.sleep(0.05)


def interrupts(listener: Listener) -> Interrupts:
    return Interrupts(listener.heard.append)


SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("number", SIGNALS)
async def test_before_the_pipeline_one_signal_leaves_at_once(number: signal.Signals) -> None:
    listener = Listener()

    async def run() -> None:
        with interrupts(listener):
            await signalled(number)
            raise AssertionError("was not left")

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(run())
    assert listener.heard == []


@pytest.mark.parametrize("number", SIGNALS)
async def test_the_pipeline_is_asked_first_and_left_at_the_second_signal(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.runtime.signals.SAME_S", 0.01)
    listener = Listener()

    async def run() -> None:
        with interrupts(listener) as handling, handling.asking(listener.request_stop, "this version"):
            await signalled(number)
            told, done = listener.heard
            assert told.startswith("stopping after this version")
            assert done == "request_stop"
            await signalled(number)
            raise AssertionError("was not left")

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(run())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_that_is_sent_in_two_ways_counts_once(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `timeout` sends it, to the process and to its group, and a terminal that closes."""
    monkeypatch.setattr("headway.runtime.signals.SAME_S", 60.0)  # on a busy machine they are far apart
    listener = Listener()
    with interrupts(listener) as handling, handling.asking(listener.request_stop, "this version"):
        await signalled(number, number)
        assert [text for text in listener.heard if text == "request_stop"] == ["request_stop"]
        await asyncio.sleep(0)  # a cancellation would be raised here


async def test_a_hangup_that_was_ignored_when_the_run_began_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with terminations_as_interrupts(), interrupts(listener := Listener()):
            await signalled(signal.SIGHUP)
        assert listener.heard == []
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_closing_is_disturbed_by_no_further_signal() -> None:
    listener, closed = Listener(), False

    async def run() -> None:
        nonlocal closed
        with interrupts(listener):
            try:
                await signalled(signal.SIGINT)
            finally:
                await signalled(signal.SIGINT, signal.SIGTERM)  # closing takes its time
                closed = True

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(run())
    assert closed
    assert listener.heard == ["ending the workers, which takes a few seconds"], "once"


async def test_a_run_that_is_over_closes_undisturbed() -> None:
    listener = Listener()
    with interrupts(listener) as handling:
        handling.leave_undisturbed()
        await signalled(signal.SIGINT)
    assert listener.heard == ["ending the workers, which takes a few seconds"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_termination_is_an_interrupt_where_no_event_loop_runs_and_itself_again_afterwards(
    number: signal.Signals,
) -> None:
    before = signal.getsignal(number)
    with terminations_as_interrupts():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # the same, sent in another way
    assert signal.getsignal(number) is before


def test_a_termination_that_arrives_again_as_its_block_is_left_counts_once() -> None:
    with terminations_as_interrupts():
        with pytest.raises(KeyboardInterrupt), terminations_as_interrupts():
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # the same, to the process group


def test_sigterm_is_an_interrupt_after_the_event_loop_too() -> None:
    async def run() -> None:
        with interrupts(Listener()):
            await asyncio.sleep(0)

    with terminations_as_interrupts():
        asyncio.run(run())
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_terminated_before_any_run_is_interrupted_in_one_line(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as left, errors_as_messages(debug=False):
        os.kill(os.getpid(), number)
    assert left.value.exit_code == 130
    assert capfd.readouterr().err == "interrupted\n"


# ---------------------------------------------------------------------------------------- whole runs, in this process


def test_a_run_trains_in_another_thread_than_the_main_one(recipe: Path, tmp_path: Path) -> None:
    _, _, *overrides = inline(recipe, tmp_path / "run", *SHORT)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with ThreadPoolExecutor(1) as another:
        assert another.submit(train, load_checked(recipe, overrides)).result() == 0
    assert summary(tmp_path / "run")["status"] == "completed"
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("during", ["headway.models.made_model.make_model", "headway.api.sft.warmup.warm_up"])
def test_one_signal_while_a_model_is_made_or_warmed_up_leaves_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, during: str, number: signal.Signals
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        os.kill(os.getpid(), number)

    async def warmed(*_: object, go_on: Callable[[], None], **__: object) -> None:
        os.kill(os.getpid(), number)
        while True:  # has no end but that of the run
            go_on()

    monkeypatch.setattr(during, warmed if during.endswith("warm_up") else interrupted)
    demo = load_checked(DEMO, ["cluster.backend=inline", f"run.dir={tmp_path / 'run'}"])
    assert train(demo) == 130
    told = summary(tmp_path / "run")
    assert (told["status"], told["reason"], told["balanced"]) == ("interrupted", "left at once", True)


def test_one_signal_while_a_warm_up_hangs_leaves_it_behind_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over, threads = threading.Event(), []

    async def hangs(*_: object, **__: object) -> None:
        threads.append(threading.current_thread())
        os.kill(os.getpid(), signal.SIGTERM)
        over.wait(60)

    monkeypatch.setattr("headway.api.sft.warmup.warm_up", hangs)
    monkeypatch.setattr(app_run, "WARM_LEFT_S", 0.1)
    demo = load_checked(DEMO, ["cluster.backend=inline", f"run.dir={tmp_path / 'run'}"])
    assert train(demo) == 130
    assert "the warm-up did not end within 0.1 s, and was left" in (tmp_path / "run" / "events.jsonl").read_text()
    assert threads[0].daemon, "no process waits for it at its end"
    assert threads[0].is_alive()
    over.set()
    threads[0].join(10)


def test_a_warm_up_that_makes_no_step_for_the_limit_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def hangs(_: object) -> None:
        over.wait(60)

    monkeypatch.setattr(app_run, "WARM_LEFT_S", 0.01)
    try:
        with pytest.raises(StallError, match=r"no step .*0\.05 s \(cluster\.stall_timeout_s\)"):
            asyncio.run(app_run._warmed(hangs, 0.05, cast(Reports, Listener())))
    finally:
        over.set()


def test_one_signal_while_the_model_is_exported_leaves_all_of_it_or_nothing(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def endless(_: TrainGroup, path: Path) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    monkeypatch.setattr(TrainGroup, "export", endless)
    run_dir = tmp_path / "run"
    _, _, *overrides = inline(recipe, run_dir, *SHORT)
    assert train(load_checked(recipe, overrides)) == 130
    assert "left at once; nothing more was saved. The newest checkpoint is that of version 1" in capsys.readouterr().out
    told = summary(run_dir)
    assert (told["status"], told["balanced"]) == ("interrupted", True)
    assert [path.name for path in run_dir.iterdir() if "model" in path.name] == []


@pytest.mark.slow
def test_an_export_that_fails_after_an_interrupt_is_told_and_the_run_stays_an_interrupted_one(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def interrupted(_: Interrupts, stop: Callable[[], None], after: str) -> Iterator[None]:
        stop()
        yield

    async def refused(_: TrainGroup, path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Interrupts, "asking", interrupted)
    monkeypatch.setattr(TrainGroup, "export", refused)
    _, _, *overrides = inline(recipe, tmp_path / "run", *SHORT[1:])
    with pytest.raises(RunError, match="not export the model"):
        train(load_checked(recipe, overrides))
    told = summary(tmp_path / "run")
    assert (told["status"], told["balanced"]) == ("interrupted", True)
    assert told["reason"].startswith("RunError: could not export the model")


# ---------------------------------------------------------------------------------------- whole runs

WITHOUT_STDOUT = """
import os, sys
os.close(1)
os.execv(sys.executable, [sys.executable, "-m", "headway", *sys.argv[1:]])
"""


@pytest.mark.slow
def test_a_run_whose_stdout_is_closed_trains_quietly(recipe: Path, tmp_path: Path) -> None:
    """In a process of its own, whose imports take seconds: its standard output is closed before it begins."""
    run_dir = tmp_path / "run"
    short = ("rollout.total_rollout_steps=4", "rollout.test_freq=-1")
    assert finish(start("-c", WITHOUT_STDOUT, *inline(recipe, run_dir, *short))) == (0, "")
    assert summary(run_dir)["status"] == "completed"


@pytest.mark.slow
def test_sigterm_to_the_group_while_workers_start_ends_the_run_and_leaves_no_process(
    recipe: Path, tmp_path: Path
) -> None:
    """In a process of its own, whose imports take seconds: what it leaves behind is seen from outside."""
    run_dir = tmp_path / "run"
    process = start("-m", "headway", *inline(recipe, run_dir))
    deadline = time.monotonic() + START_S
    while not (run_dir / "logs" / "reward.log").exists():
        assert process.poll() is None, finish(process)
        assert time.monotonic() < deadline
        time.sleep(0.05)
    started = descendants(process.pid)
    os.killpg(process.pid, signal.SIGTERM)
    code, output = finish(process)
    assert code == 130, output
    assert "Traceback" not in output
    assert summary(run_dir)["status"] == "interrupted"
    assert alive(started) == []


@pytest.mark.slow
def test_a_run_that_is_left_at_once_says_how_to_go_on(recipe: Path, tmp_path: Path) -> None:
    """In a process of its own, whose imports take seconds: two signals come while it trains."""
    run_dir = tmp_path / "a run"
    process = start(
        "-m", "headway", *inline(recipe, run_dir, "trainer.save_freq=1", "rollout.total_rollout_steps=65536")
    )
    wait_for("checkpoint.saved", process, run_dir)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 130, output
    assert summary(run_dir)["status"] == "interrupted"
    (told,) = (line for line in output.splitlines() if "left at once; nothing more was saved" in line)
    assert f"go on from it with: headway train --resume '{run_dir}'" in told
    assert summary(run_dir)["balanced"]


@contextmanager
def no_large_file() -> Iterator[None]:
    """What this process writes: reports are smaller, and so is the exported model; a checkpoint is larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (250_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_at_one_checkpoint_is_told_and_training_goes_on_as_if_nothing_had_happened(
    recipe: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Takes seconds: a whole run."""
    save, first = learner.save_checkpoint, iter([True])

    def full_at_first(*args: Any, **kwargs: Any) -> None:
        with no_large_file() if next(first, False) else nullcontext():
            save(*args, **kwargs)

    monkeypatch.setattr(learner, "save_checkpoint", full_at_first)
    run_dir = tmp_path / "run"
    told = support.train(recipe, run_dir, "cluster.backend=inline", "trainer.save_freq=1")
    assert (told["status"], told["balanced"], told["checkpoints"]["failed"]) == ("completed", True, 1)
    assert told["checkpoints"]["saved"] == told["version"] - 1
    (failed,) = events(run_dir, "checkpoint.failed")
    assert failed["version"] == 1 and "File too large" in failed["reason"]
    assert weights(run_dir / "model") == weights(undisturbed / "model")


@pytest.mark.slow
@pytest.mark.parametrize("in_a_row", [2, 3])
def test_a_disk_that_is_full_for_some_checkpoints_keeps_the_last_good_one(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_a_row: int
) -> None:
    """A whole run, on a file system of its own, which is full while checkpoints 2 and 3, or 2 to 4, are written."""
    save, calls = checkpoint.save, itertools.count(1)
    with small_disk(tmp_path / "disk", 40 * 2**20) as fill:

        def with_no_room(*args: Any, **kwargs: Any) -> None:
            number = next(calls)
            fill(2 <= number < 2 + in_a_row)
            save(*args, **kwargs)

        monkeypatch.setattr(checkpoint, "save", with_no_room)
        run_dir = tmp_path / "disk" / "run"
        done = run_here(*inline(recipe, run_dir, "trainer.save_freq=1"))
        fill(False)
        assert done.output.count("was not saved, and training goes on") == in_a_row, done.output
        assert "No space left on device; make room there" in done.output
        assert "Traceback" not in done.output
        there = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
        if in_a_row < 3:
            assert done.exit_code == 0, done.output
            assert there == ["version_1", "version_4"]
            assert [event["version"] for event in events(run_dir, "checkpoint.saved")] == [1, 4]
            assert (summary(run_dir)["status"], summary(run_dir)["balanced"]) == ("completed", True)
        else:
            assert done.exit_code == 1
            assert there == ["version_0", "version_1"]
            done = run_here("train", "--resume", str(run_dir))
            assert done.exit_code == 0, done.output
            assert summary(run_dir)["resumed"] == 1


@pytest.mark.slow
def test_a_full_disk_at_three_checkpoints_is_one_message_and_half_a_checkpoint_is_removed(
    recipe: Path, tmp_path: Path
) -> None:
    """Takes seconds: a whole run until its third checkpoint."""
    run_dir = tmp_path / "run"
    with no_large_file():
        done = run_here(*inline(recipe, run_dir, "trainer.save_freq=1"))
    code, output = done.exit_code, done.output
    assert code == 1, output
    errors = output[output.index("error: ") :].splitlines()
    assert output.count("was not saved, and training goes on") == 3
    where = run_dir / "checkpoints" / "version_3"
    assert errors[0].endswith("No checkpoint could be saved 3 times in a row")
    assert errors[0].startswith(f"error: could not write the checkpoint {where}: File too large; raise the limit")
    assert errors[1:] == [
        f"The newest checkpoint is that of version 0; go on from it with: headway train --resume {run_dir}"
    ]
    assert "Traceback" not in output
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["version_0"]
    told = summary(run_dir)
    assert (told["status"], told["balanced"]) == ("failed", True)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["raylet", "gcs_server"])
def test_a_run_whose_own_ray_is_killed_ends_soon_and_says_so(recipe: Path, tmp_path: Path, program: str) -> None:
    """A run in a process of its own, on a Ray of its own. Without either, no worker can be started again."""
    run_dir = tmp_path / "run"
    settings = ("cluster.backend=ray", "rollout.total_rollout_steps=100000", f"run.dir={run_dir}")
    process = start("-m", "headway", "train", str(recipe), *settings)
    wait_for('"kind": "version.reached", ', process, run_dir, times=2)
    started = list(descendants(process.pid))
    (pid,) = (pid for pid in started if Path(f"/proc/{pid}/exe").readlink().name == program)
    os.kill(pid, signal.SIGKILL)
    code, output = finish(process, timeout_s=100)
    assert code == 1 and f"Ray's {program} on this machine (pid {pid}) ended" in output
    assert not alive(started)
