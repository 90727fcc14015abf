"""Scripted machinery behind the pipeline's protocols: the simulated engines of `headway.planner`, and what a test does
to them.

Durations are powers of two, so that times on the virtual clock are exact: a replica samples one token every
``SECONDS_PER_TOKEN`` for each trajectory in a slot, however many there are.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.agents.episodes.episode_worker import EpisodeWorker
from headway.agents.episodes.program_episode import Hosting
from headway.agents.episodes.request_dispatcher import CallEngine
from headway.data.interfaces.episode_groups import Group, Scores
from headway.data.interfaces.rollout import Completion, EngineStats, GenerateRequest, OnUpdate, Paused, Priority
from headway.data.interfaces.weights import ReceiveReport
from headway.data.types import Prompt, TrajectoryId
from headway.errors import HeadwayError, RunError, ScoringFailed, UpdateFailed, WorkerDied
from headway.events import Event
from headway.pipeline.recovery.liveness import ProcessLook, given_up
from headway.planner.profiles.job_profile import PhaseProfile, RolloutProfile, UpdateProfile
from headway.planner.simulation.simulated_rollout import SimulatedRollout
from headway.planner.simulation.simulated_trainer import SimulatedTransport
from headway.runtime.progress import Heartbeat
from headway.runtime.task_groups import concurrently

SECONDS_PER_TOKEN = 0.125

UPDATE = UpdateProfile(nbytes=1000, gather=PhaseProfile(latency_s=0.25), recv=PhaseProfile(latency_s=0.25))

Lengths = Callable[[TrajectoryId], int]
"""Tokens that a trajectory will have."""

Probe = Callable[[int], NDArray[np.float32]]
"""Log-probs of the probe's sequences under a version."""

Time = tuple[float, float]
"""From, to."""

Numbers = dict[tuple[int, int, int, Priority], int]
"""(epoch, row, attempt, priority) → number of the group, or of the held-out problem."""


Numbered = tuple[str, int]
"""A call of one replica: its client, and the number that the client gave it."""
Failing = Callable[[int, int], str | None]
"""A function of a group's number and k that returns why that episode fails, or None."""


class FakeEpisodeWorker(EpisodeWorker):
    """An episode worker that tells which group a prompt was asked for, in ``numbers``, fails some episodes, and can be
    told to die."""

    def __init__(
        self,
        numbers: Numbers,
        name: str = "episode-worker-0",
        failing: Failing | None = None,
        hosting: Hosting | None = None,
    ) -> None:
        super().__init__(name, hosting=hosting)
        self._numbers = numbers
        self._failing = failing
        self._death: WorkerDied | None = None
        self._process_ended = asyncio.Event()
        self.asked: list[tuple[float, list[int], Priority]] = []
        """(time, numbers of groups, priority) of every `generate`."""
        self.silent = False
        """Answers no call, and yields nothing, until it comes back."""
        self._back = asyncio.Event()

    @property
    def is_dead(self) -> bool:
        return self._death is not None

    async def generate(self, requests: Sequence[Group], *, on: str | None = None) -> AsyncGenerator[Group, None]:
        self._check_alive()
        await self._unless_silent()
        self.asked.append((now(), [request.number for request in requests], requests[0].priority))
        for request in requests:
            prompt_ = request.prompt
            self._numbers[prompt_.epoch, prompt_.row, prompt_.attempt, request.priority] = request.number
        async for finished in super().generate(requests, on=on):
            await self._unless_silent()
            self._check_alive()
            yield finished if self._failing is None else self._some_failed(finished, self._failing)

    def _some_failed(self, finished: Group, failing: Failing) -> Group:
        reasons = [(t, failing(finished.number, t.id.k)) for t in finished.trajectories]
        made = [t if reason is None else replace(t, failure=reason, rows=()) for t, reason in reasons]
        return replace(finished, trajectories=tuple(made))

    def die(self, why: str = "was killed") -> None:
        """End as a process does that is killed: replicas are not told, and go on with its calls."""
        if self._death is not None:
            return
        self._death = WorkerDied(f"{self.name} {why}")
        self._process_ended.set()
        for client in self._calls._clients.values():
            client._tasks[1].cancel()  # it tells them nothing more
        self.end(self._death)
        self._calls._failures.put_nowait((self.name, self._death))

    def fall_silent(self, noticed_after_s: float) -> None:
        """Answer nothing from now on, as where its machine is cut off; supervision tells of it so much later."""
        self.silent = True
        asyncio.get_running_loop().call_later(noticed_after_s, self._process_ended.set)

    def come_back(self) -> None:
        """Go on with what was under way when it fell silent, and with what it was told since."""
        self.silent = False
        self._back.set()

    async def died(self) -> None:
        """What supervision of its process would tell."""
        await concurrently([self._process_lost(), self._given_up()])

    async def heartbeat(self) -> Heartbeat:
        await self._unless_silent()
        return Heartbeat("")

    async def _look(self) -> ProcessLook | None:
        return None

    async def _given_up(self) -> None:
        raise WorkerDied(f"{self.name} {await given_up(self.heartbeat, self._look, 60.0)}")

    async def _process_lost(self) -> None:
        await self._process_ended.wait()
        raise self._death or WorkerDied(f"{self.name} is lost: its machine does not answer")

    async def bury(self) -> None:
        """Leave nothing behind of an episode worker that is dead, silent, or back too late."""
        if self.is_dead or self.silent or self._back.is_set():
            await super().close()

    async def failures(self) -> AsyncGenerator[tuple[str, HeadwayError], None]:
        async for failure in super().failures():
            self._check_alive()
            yield failure

    async def join(self, replica: CallEngine) -> None:
        await self._ordered(super().join(replica))

    async def leave(self, replica: str) -> None:
        await self._ordered(super().leave(replica))

    async def route(self, replicas: Sequence[str], halted: bool = False) -> None:
        await self._ordered(super().route(replicas, halted))

    async def hold(self) -> None:
        await self._ordered(super().hold())

    async def go_on(self) -> None:
        await self._ordered(super().go_on())

    async def abort_older_than(self, version: int) -> None:
        await self._ordered(super().abort_older_than(version))

    async def close(self) -> None:
        await self._ordered(super().close())

    async def _ordered(self, call: Coroutine[Any, Any, None]) -> None:
        """Do what a living episode worker was told. A call that is under way when the episode worker dies ends with
        that."""
        try:
            self._check_alive()
            await self._unless_silent()
        except BaseException:
            call.close()
            raise
        await call
        self._check_alive()

    async def _unless_silent(self) -> None:
        if self.silent:
            await self._back.wait()

    def _check_alive(self) -> None:
        if self._death is not None:
            raise self._death


def now() -> float:
    return asyncio.get_running_loop().time()


def seeded_lengths(seed: int, low: int = 4, high: int = 40) -> Lengths:
    """Uniform on [low, high], a function of (seed, trajectory id) alone."""
    return lambda trajectory: random.Random(f"{seed} {tuple(trajectory)}").randint(low, high)


class Recorder:
    """An observer that keeps every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.on: Callable[[Event], None] = lambda _: None
        """Called with each event; for scripts that act at a certain one."""

    def on_event(self, event: Event) -> None:
        self.events.append(event)
        self.on(event)

    def close(self) -> None: ...


class FakeSource:
    """``rows`` prompts an epoch; ``epochs`` None goes on for ever. Validation problems are rows of epoch -1."""

    def __init__(self, rows: int = 1000, epochs: int | None = None) -> None:
        self._rows = rows
        self._epochs = epochs
        self.given = 0

    def next(self) -> Prompt | None:
        epoch, row = divmod(self.given, self._rows)
        if self._epochs is not None and epoch >= self._epochs:
            return None
        self.given += 1
        return prompt(epoch, row)

    def again(self, prompt_: Prompt) -> Prompt:
        return prompt(prompt_.epoch, prompt_.row, prompt_.attempt + 1)

    def find(self, epoch: int, row: int) -> Prompt | None:
        return prompt(epoch, row) if row < self._rows else None

    def state(self) -> dict[str, Any]:
        return {"given": self.given}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.given = state["given"]


def prompt(epoch: int, row: int, attempt: int = 0) -> Prompt:
    text = f"problem {epoch}/{row}/{attempt}"
    return Prompt(epoch, row, attempt, "fake", text, np.arange(3, dtype=np.int32), answer=row)


def validation_prompts(count: int) -> list[Prompt]:
    return [prompt(-1, row) for row in range(count)]


# ---------------------------------------------------------------------------------------------- rewards


class FakeReward:
    """Scores ``seconds`` after it was asked. ``rewards`` gives the scores, or raises what the reward should raise.

    ``parts``: what each part of the reward gave to every answer.
    """

    def __init__(
        self,
        rewards: Callable[[Prompt], Sequence[float]] | None = None,
        seconds: Callable[[Prompt], float] = lambda _: 0.25,
        parts: Mapping[str, Sequence[float | None]] | None = None,
    ) -> None:
        self._rewards = rewards
        self._seconds = seconds
        self._parts = parts or {}

    async def score(self, prompt: Prompt, responses: Sequence[str], conversations: object = None) -> Scores:
        await asyncio.sleep(self._seconds(prompt))
        parts = {name: list(values[: len(responses)]) for name, values in self._parts.items()}
        return Scores(self.rewards(prompt, len(responses)), parts)

    def rewards(self, prompt: Prompt, n: int) -> NDArray[np.float32]:
        """[n]"""
        rewards = self._rewards(prompt) if self._rewards else [float(k % 2) for k in range(n)]
        return np.resize(np.asarray(rewards, np.float32), n)

    async def close(self) -> None: ...


def fails(why: str) -> Sequence[float]:
    raise ScoringFailed(why)


# ---------------------------------------------------------------------------------------------- rollout


class FakeRollout(SimulatedRollout):
    """A simulated replica that remembers what was asked of it, and can be told to misbehave."""

    def __init__(
        self,
        name: str,
        *,
        transport: SimulatedTransport,
        lengths: Lengths,
        slots: int = 8,
        prefill_s: float = 0.0,
        prefill_token_s: float = 0.0,
        kv_tokens: int | None = None,
        load_s: float = 0.125,
        double_buffered: bool = True,
    ) -> None:
        super().__init__(
            name,
            profile=RolloutProfile(
                slots=slots,
                decode=[(1, SECONDS_PER_TOKEN)],
                prefill_s=prefill_s,
                prefill_token_s=prefill_token_s,
                kv_tokens=kv_tokens,
            ),
            lengths=lengths,
            receive=transport.receive,
            load_s=load_s,
        )
        self.capabilities = replace(self.capabilities, double_buffered=double_buffered)
        self.cut = 0
        """Trajectories with tokens that a pause stopped, over the whole run."""
        self.hangs = False
        """Samples nothing for what it is asked from now on."""
        self.hangs_on_drain = False
        self.stamps_version_0 = False
        """On every token, whatever sampled it."""
        self.paused = False
        self.never_receives = False
        self.silent_on: set[str] = set()
        """Calls that it never answers: ``pause``, ``resume``, ``activate``, ``probe``."""
        self.fails_to_receive: list[UpdateFailed] = []
        """What the next calls of `stage_weights` raise, after they have received."""
        self.serves: Probe | None = None
        """What its probe finds under a version."""
        self.torn = False
        """Without a second buffer: a part of a version came over the one that it served."""
        self.slept: list[tuple[float, bool]] = []
        """(time, whether it kept its weights) of every `sleep`."""
        self._ended = asyncio.Event()
        self.died_at: float | None = None
        self.loads: list[tuple[int, float]] = []
        """(version, time) of every activation."""
        self.received: list[tuple[int, Time]] = []
        """(version, when) of every transfer that arrived."""
        self.stood: list[Time] = []
        """From the end of each pause to what ended it, `resume` or the replica's death."""
        self.validated: list[Time] = []
        """From asking for the answers to all held-out problems to having them."""
        self.work: list[tuple[float, int]] = []
        """(time, change) of the number of trajectories that it has to sample and may."""
        self.stopped: float | None = None
        """When the pause that holds had stopped it."""
        self._pausing = False
        self._held: set[Numbered] = set()
        """Calls that were asked for since a pause began: they wait for `resume`."""
        self._open: set[Numbered] = set()
        """Calls that are not finished."""
        self.submitted: list[tuple[float, tuple[int, ...], Priority]] = []
        """(time, numbers of groups, priority) of every `submit`."""
        self.numbers: Numbers = {}
        self._validating: set[Numbered] = set()
        """Calls of a validation that are not finished."""
        self._asked = 0.0

    def hang_core(self) -> None:
        """Compute nothing more, and answer as before."""
        self._replica.slow_down(1e12)

    async def submit(self, client: str, calls: Sequence[GenerateRequest]) -> None:
        for priority in dict.fromkeys(call.priority for call in calls):
            those = [call for call in calls if call.priority is priority]
            numbers = dict.fromkeys(self.numbers.get((*call.trajectory[:3], priority), -1) for call in those)
            self.submitted.append((now(), tuple(numbers), priority))
        if self.hangs:
            return
        if validating := {(client, call.number) for call in calls if call.priority is Priority.VALIDATION}:
            if not self._validating:
                self._asked = now()
            self._validating |= validating
        self._takes({(client, call.number) for call in calls})
        await super().submit(client, calls)

    async def finished(self, client: str) -> AsyncIterator[Sequence[Completion]]:
        async for batch in super().finished(client):
            self.work += [(call.finished, -1) for call in batch]
            calls = {(client, call.number) for call in batch}
            self._open -= calls
            validated = calls & self._validating
            self._validating -= validated
            if validated and not self._validating:
                self.validated.append((self._asked, now()))
            yield [_of_version_0(call) for call in batch] if self.stamps_version_0 else batch

    async def drop(self, client: str) -> None:
        await super().drop(client)
        gone = {call for call in self._open if call[0] == client}
        self._open -= gone
        self._validating -= gone
        self.work.append((now(), -len(gone - self._held)))
        self._held -= gone

    def _takes(self, calls: set[Numbered]) -> None:
        self._open |= calls
        if self._pausing:
            self._held |= calls
        else:
            self.work.append((now(), len(calls)))

    async def pause(self, policy: OnUpdate) -> Paused:
        self._pausing = True
        await self._unless_silent("pause")
        paused = await super().pause(policy)
        if self.hangs_on_drain and policy is OnUpdate.DRAIN:
            await asyncio.Event().wait()
        self.cut += paused.interrupted
        self.paused = True
        self.stopped = now()
        return paused

    async def resume(self) -> None:
        await self._unless_silent("resume")
        if self.torn:
            raise RunError(f"{self.name} was told to resume with torn weights")
        self.paused = False
        self._stands_no_more()
        self._pausing, held, self._held = False, self._held, set()
        self._takes(held)
        await super().resume()

    def die(self, error: BaseException) -> None:
        if self.died_at is None:
            self.died_at = now()
            self._stands_no_more()
            self._ended.set()
        super().die(error)

    async def died(self) -> None:
        """What supervision of its process would tell."""
        await self._ended.wait()
        self._check_alive()

    def _stands_no_more(self) -> None:
        if self.stopped is not None:
            self.stood.append((self.stopped, now()))
            self.stopped = None

    async def stage_weights(self, version: int) -> ReceiveReport:
        if self.never_receives:
            await asyncio.Event().wait()
        started = now()
        if not self.capabilities.double_buffered:
            if not self.paused:
                raise RunError(f"{self.name} receives over the weights that it decodes with")
            self.torn = True
        report = await super().stage_weights(version)
        if self.fails_to_receive:
            raise self.fails_to_receive.pop(0)
        self.torn = False
        self.received.append((version, (started, now())))
        return report

    async def activate(self, version: int) -> float:
        await self._unless_silent("activate")
        seconds = await super().activate(version)
        self.loads.append((version, now()))
        return seconds

    async def probe(self) -> NDArray[np.float32] | None:  # type: ignore[override]
        await self._unless_silent("probe")
        if not self.paused or self._asleep:
            raise RunError(f"{self.name} was asked for its probe while it was not just paused")
        return self.serves(self.version) if self.serves else None

    async def sleep(self, *, keep_weights: bool = True) -> None:
        self.slept.append((now(), keep_weights))
        await super().sleep(keep_weights=keep_weights)

    async def _unless_silent(self, call: str) -> None:
        if call in self.silent_on:
            await asyncio.Event().wait()

    async def stats(self) -> EngineStats:
        await self._unless_silent("stats")
        return await super().stats()


def _of_version_0(finished: Completion) -> Completion:
    return replace(finished, version_spans=[[0, 0]])
