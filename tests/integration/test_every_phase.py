"""In each phase of a run: Ctrl-C, Ctrl-C twice, and the death of each worker.

A phase is the call to a worker that begins it, so that signals and deaths come at one exact moment. Runs are inline,
and a worker that dies there answers nobody any more; some are on Ray, where the process is killed.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any, NoReturn

import pytest

import headway.api.run.training_run
from headway.cluster.inline_cluster import InlineWorker
from headway.cluster.on_ray.ray_worker import RayPeer, RayWorker
from headway.errors import WorkerDied
from headway.reports.report_manager import Reports
from headway.runtime.process_tree import descendants
from tests.integration.support import Done, alive, events, make_job, run_here, summary
from tests.tiers import mostly_slow


@dataclass(frozen=True)
class Phase:
    worker: str
    method: str
    """The phase begins when this method of ``worker`` is called."""
    overrides: tuple[str, ...] = ()
    nth: int = 1
    """Which of its calls."""


PHASES = {
    "start": Phase("actor-0", "build"),
    "validation": Phase("rollout-0", "engine.submit"),
    "training": Phase("actor-0", "train_step", nth=3),  # version 2's checkpoint has begun: version 1's is complete
    "gather": Phase("actor-0", "gather_weights", ("mode=overlapped",)),
    "send": Phase("actor-0", "send_weights"),
    "recv": Phase("rollout-0", "stage_weights"),
    "load": Phase("rollout-0", "activate"),
    "checkpoint": Phase("actor-0", "save"),
    "export": Phase("actor-0", "export"),
}
IN_THE_PIPELINE = [name for name in PHASES if name not in ("start", "export")]
SMALL = ("data.max_response_length=4", "data.task.val_size=2", "reward.function=task")
"""Short answers, scored without a process."""
KEPT = (b"resource_tracker import main", b"forkserver import main")
"""In the command lines of processes that `multiprocessing` keeps for later."""


class Moments:
    """Does something at the beginning of a phase, once."""

    def __init__(self, phase: Phase, do: Callable[[], None]) -> None:
        self._phase = phase
        self._do = do
        self._calls = 0

    def called(self, worker: str, method: str) -> None:
        if (worker, method) == (self._phase.worker, self._phase.method):
            self._calls += 1
            if self._calls == self._phase.nth:
                self._do()


def headway_train(recipe: Path, run_dir: Path, *overrides: str) -> Done:
    """The command in this process, to its end; none of the processes that it started are left."""
    before = set(descendants(os.getpid()))
    settings = (*SMALL, "trainer.save_freq=1", "reports.trackers=[]", *overrides, f"run.dir={run_dir}")
    done = run_here("train", str(recipe), *settings)
    theirs = before.union(descendants(*before))  # Ray, where it runs, starts processes when it likes
    left = alive([pid for pid in descendants(os.getpid()) if pid not in theirs and not _is_kept(pid)])
    assert left == []
    assert "Traceback" not in done.stderr
    return done


def _is_kept(pid: int) -> bool:
    try:
        return any(words in Path(f"/proc/{pid}/cmdline").read_bytes() for words in KEPT)
    except OSError:
        return True  # it has ended


# ---------------------------------------------------------------------------------------- Ctrl-C


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def at(phase: Phase, monkeypatch: pytest.MonkeyPatch, do: Callable[[], None]) -> None:
    """``do`` it when the phase of an inline run begins."""
    moments, call, each = Moments(phase, do), InlineWorker.call, InlineWorker.each

    async def noted_call(worker: InlineWorker, method: str, *args: Any) -> Any:
        moments.called(worker.name, method)
        return await call(worker, method, *args)

    def noted_each(worker: InlineWorker, method: str, *args: Any, **settings: Any) -> Any:
        moments.called(worker.name, method)
        return each(worker, method, *args, **settings)

    monkeypatch.setattr(InlineWorker, "call", noted_call)
    monkeypatch.setattr(InlineWorker, "each", noted_each)


@mostly_slow("name", PHASES, quick=["start", "training", "export"])
def test_ctrl_c_in_any_phase_ends_the_run_in_order(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Takes seconds: a whole run, with a checkpoint and an export at its end."""
    phase = PHASES[name]
    at(phase, monkeypatch, interrupt)
    total = 4 if name == "export" else 32
    settings = ("cluster.backend=inline", f"rollout.total_rollout_steps={total}", *phase.overrides)
    done = headway_train(recipe, tmp_path / "run", *settings)
    assert done.exit_code == 130, done.stderr
    told = summary(tmp_path / "run")
    assert told["balanced"]
    if name in IN_THE_PIPELINE:
        assert "stopping after this version; press Ctrl-C again to leave at once" in done.stdout
        assert told["status"] == "interrupted"
        assert told["groups"]["trained"] == told["version"] * 4 < 32
        assert (told["version"] == 0) == (name == "validation"), "a version that was begun is finished"
        assert (tmp_path / "run" / "checkpoints" / f"version_{told['version']}").is_dir()
        assert f"headway train --resume {tmp_path / 'run'}" in done.stdout
    elif name == "start":
        assert "left at once; nothing more was saved" in done.stdout
        assert told["status"] == "interrupted"
    else:  # a thread that has begun to export comes to its end, for inline it cannot be killed
        whole = (tmp_path / "run" / "model" / "model.safetensors").is_file()
        assert f"left at once; {'the run was complete' if whole else 'nothing more was saved'}" in done.stdout
        assert told["status"] == ("completed" if whole else "interrupted")


@mostly_slow("name", IN_THE_PIPELINE, quick=["recv"])
def test_ctrl_c_twice_in_any_phase_leaves_at_once(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Takes seconds: a whole run until the phase, which user code may hold up."""
    phase, note = PHASES[name], headway.api.run.training_run.note

    def again(reports: Reports, text: str) -> None:
        note(reports, text)
        if text.startswith("stopping after this version"):
            interrupt()

    at(phase, monkeypatch, interrupt)
    monkeypatch.setattr("headway.api.run.training_run.note", again)
    settings = ("cluster.backend=inline", "rollout.total_rollout_steps=32", *phase.overrides)
    done = headway_train(recipe, tmp_path / "run", *settings)
    assert done.exit_code == 130, done.stderr
    assert "left at once; nothing more was saved" in done.stdout
    told = summary(tmp_path / "run")
    assert (told["status"], told["reason"], told["balanced"]) == ("interrupted", "left at once", True)


# ---------------------------------------------------------------------------------------- a full disk


def test_a_full_disk_at_the_export_is_one_message_and_the_run_that_goes_on_exports(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over 5 s beside other work: trains, and goes on in a second process."""

    def no_room() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run_dir = tmp_path / "run"
    at(PHASES["export"], monkeypatch, no_room)
    done = headway_train(recipe, run_dir, "cluster.backend=inline", "rollout.total_rollout_steps=4")
    assert done.exit_code == 1
    message, how = done.stderr.splitlines()
    assert message.startswith(
        f"error: could not export the model to {run_dir / 'model'}: OSError: [Errno 28] No space left on device"
    )
    assert f"headway train --resume {run_dir}" in how
    monkeypatch.undo()
    done = run_here("train", "--resume", str(run_dir))
    assert done.exit_code == 0, done.output
    assert (run_dir / "model" / "model.safetensors").is_file()


# ---------------------------------------------------------------------------------------- damaged files


@pytest.mark.slow
def test_a_model_folder_that_breaks_while_the_run_trains_is_told_at_the_export_of_a_complete_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Takes longer where it is the first run in its process, which imports torch and transformers."""
    own, run_dir = make_job(tmp_path), tmp_path / "run"
    at(PHASES["export"], monkeypatch, lambda: (tmp_path / "model" / "tokenizer.json").write_text("{"))
    done = headway_train(own, run_dir, "cluster.backend=inline", "rollout.total_rollout_steps=4")
    assert done.exit_code == 1, done.stderr
    message, how = done.stderr.splitlines()
    model = tmp_path / "model"
    assert message.startswith(f"error: could not export the model to {run_dir / 'model'}: {model}: cannot open the tok")
    assert how.startswith("Training is complete, and what is missing is made by going on. ")
    assert f"headway train --resume {run_dir}" in how
    assert summary(run_dir)["status"] == "completed"


@pytest.mark.slow
def test_a_damaged_checkpoint_is_one_line_that_does_not_send_to_that_checkpoint_again(
    undisturbed: Path, tmp_path: Path
) -> None:
    """Resumes a run."""
    run_dir = Path(copytree(undisturbed, tmp_path / "run"))
    newest = run_dir / "checkpoints" / "version_4"
    shard = newest / "__0_0.distcp"
    shard.write_bytes(bytes(byte ^ 0x5A for byte in shard.read_bytes()))
    longer = ("train", "--resume", str(run_dir), "rollout.total_rollout_steps=20")
    done = run_here(*longer)
    assert done.exit_code == 2, done.output
    (message,) = done.stderr.splitlines()
    assert message == (
        f"error: {newest}: the checkpoint is damaged: rank 0: UnpicklingError: Weights only load failed. Remove it, to "
        "resume from the one before"
    )
    rmtree(newest)
    done = run_here(*longer)
    assert done.exit_code == 0, done.output
    assert summary(run_dir)["version"] == 5


# ---------------------------------------------------------------------------------------- deaths, inline


Stream = Callable[..., AsyncGenerator[Any, None]]


class Deaths:
    """Inline workers that can die: whoever waits for one that did, or calls it, is told so, as Ray tells it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, moments: Moments) -> None:
        self._moments = moments
        self._dead: dict[str, asyncio.Event] = {}
        self._unheard: list[asyncio.Future[Any]] = []
        """What dead workers were doing: their threads are this process's, and come to an end."""
        call, kill = InlineWorker.call, InlineWorker.kill

        async def mortal_call(worker: InlineWorker, method: str, *args: Any) -> Any:
            self._moments.called(worker.name, method)
            if method == "close":  # of `kill`, which ends what a process's death would
                return await call(worker, method, *args)
            if self._of(worker.name).is_set():
                raise _death(worker.name)
            return await self._unless_dead(worker.name, call(worker, method, *args))

        def mortal(stream: Stream) -> Stream:
            async def mortal_stream(
                worker: InlineWorker, method: str, *args: Any, **settings: Any
            ) -> AsyncGenerator[Any, None]:
                self._moments.called(worker.name, method)
                items = stream(worker, method, *args, **settings)
                while True:
                    try:
                        yield await self._unless_dead(worker.name, anext(items))
                    except StopAsyncIteration:
                        return

            return mortal_stream

        async def mortal_died(worker: InlineWorker) -> NoReturn:
            await self._of(worker.name).wait()
            raise _death(worker.name)

        async def mortal_kill(worker: InlineWorker) -> None:
            for doing in self._unheard:
                doing.cancel()
            await asyncio.gather(*self._unheard, return_exceptions=True)
            await kill(worker)

        for name, method in (
            ("call", mortal_call),
            ("keep", mortal_call),
            ("each", mortal(InlineWorker.each)),
            ("died", mortal_died),
            ("kill", mortal_kill),
        ):
            monkeypatch.setattr(InlineWorker, name, method)

    def kill(self, worker: str) -> None:
        self._of(worker).set()

    def _of(self, worker: str) -> asyncio.Event:
        return self._dead.setdefault(worker, asyncio.Event())

    async def _unless_dead(self, worker: str, doing: Coroutine[Any, Any, Any]) -> Any:
        answer, death = asyncio.ensure_future(doing), asyncio.ensure_future(self._of(worker).wait())
        try:
            await asyncio.wait({answer, death}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            answer.cancel()
            raise
        finally:
            death.cancel()
        if self._of(worker).is_set():
            self._unheard.append(answer)
            raise _death(worker)
        return await answer


def _death(worker: str) -> WorkerDied:
    return WorkerDied(f"worker {worker} died: its process ended")


def check_end_by_death(done: Done, run_dir: Path, victim: str) -> None:
    """One message, which names ``victim``; a summary that balances; how to go on, once training has begun."""
    assert done.exit_code == 1, done.stderr
    message, *notes = done.stderr.splitlines()
    assert message.startswith(f"error: worker {victim} died: "), done.stderr
    told = summary(run_dir)
    assert (told["status"], told["balanced"]) == ("failed", True)
    assert told["reason"].startswith(f"WorkerDied: worker {victim} died: ")
    (how,) = notes or [""]
    assert bool(events(run_dir, "version.reached")) == (f"headway train --resume {run_dir}" in how), done.stderr


def check_missing_export(done: Done, run_dir: Path, why: str) -> None:
    """The run is complete, its exit code and message say that the model is missing, and how to get it."""
    assert done.exit_code == 1, done.stderr
    message, how = done.stderr.splitlines()
    assert message.startswith(f"error: could not export the model to {run_dir / 'model'}: {why}")
    assert how.startswith("Training is complete, and what is missing is made by going on. The newest checkpoint is ")
    assert f"headway train --resume {run_dir}" in how
    told = summary(run_dir)
    assert (told["status"], told["balanced"]) == ("completed", True)
    assert told["reason"].startswith("RunError: could not export the model to ")


@mostly_slow(
    ("name", "victim"),
    product(PHASES, ["actor-0", "rollout-0"]),
    quick=[
        ("start", "rollout-0"),
        ("validation", "rollout-0"),
        ("training", "actor-0"),
        ("recv", "rollout-0"),
    ],
)
def test_a_worker_that_dies_in_any_phase_ends_the_run_with_its_name_unless_nobody_needs_it_any_more(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, victim: str
) -> None:
    """Takes seconds: a whole run until the phase."""
    phase = PHASES[name]
    deaths = Deaths(monkeypatch, Moments(phase, lambda: deaths.kill(victim)))
    run_dir = tmp_path / "run"
    settings = ("cluster.backend=inline", "rollout.total_rollout_steps=12", *phase.overrides)
    done = headway_train(recipe, run_dir, *settings)
    if (name, victim) == ("export", "rollout-0"):
        assert (done.exit_code, done.stderr) == (0, "")
        told = summary(run_dir)
        assert (told["status"], told["balanced"]) == ("completed", True)
        assert (run_dir / "model" / "model.safetensors").is_file()
    elif name == "export":
        check_missing_export(done, run_dir, f"worker {victim} died: ")
    else:
        check_end_by_death(done, run_dir, victim)


# ---------------------------------------------------------------------------------------- deaths, on Ray


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "victim"),
    [
        ("start", "actor-0"),
        ("validation", "rollout-0"),
        ("send", "actor-0"),
        ("recv", "rollout-0"),
        ("checkpoint", "actor-0"),
    ],
)
def test_a_process_that_is_killed_in_a_phase_ends_the_run_in_the_same_way_on_ray(
    ray_here: None, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, victim: str
) -> None:
    """Two workers are started, and import torch, before the phase comes."""
    run_dir, pids = tmp_path / "run", dict[str, int]()

    def kill() -> None:
        os.kill(pids[victim], signal.SIGKILL)

    # Episode workers call replicas themselves: what the driver sees of a validation is what it asks for.
    phase = Phase("episode-worker-0", "generate") if name == "validation" else PHASES[name]
    moments, up, call, each = Moments(phase, kill), RayWorker.up, RayWorker.call, RayPeer.each

    async def noted_up(worker: RayWorker) -> None:
        await up(worker)
        assert worker.pid is not None
        pids[worker.name] = worker.pid

    async def noted_call(worker: RayWorker, method: str, *args: Any) -> Any:
        answer = asyncio.ensure_future(call(worker, method, *args))
        await asyncio.sleep(0)  # sent
        moments.called(worker.name, method)
        return await answer

    def noted_each(peer: RayPeer, method: str, *args: Any, **settings: Any) -> Any:
        moments.called(peer.name, method)
        return each(peer, method, *args, **settings)

    monkeypatch.setattr(RayWorker, "up", noted_up)
    monkeypatch.setattr(RayWorker, "call", noted_call)
    monkeypatch.setattr(RayPeer, "each", noted_each)
    settings = ("cluster.backend=ray", "rollout.total_rollout_steps=8", "param_update.timeout_s=20")
    done = headway_train(recipe, run_dir, *settings, "cluster.max_replica_restarts=0", "trainer.max_restarts=0")
    check_end_by_death(done, run_dir, victim)
    assert f"its process (pid {pids[victim]}) ended during " in done.stderr
    assert f"Its log: {run_dir}/logs/{victim}.log. If the log does not tell why, " in done.stderr
    assert alive([*pids.values()]) == []
