"""Episode worker: makes groups of episodes with calls to replicas, and hands on each complete group.

    generate ─▶ group ─▶ n episodes ─call─▶ Calls ─▶ a replica
                  ▲            ▲                       │
      Group, made              └─────── Completion ◀───┘

An episode of the one-turn program is one call with the prompt's ids; an episode of a user's program is a
`headway.agents.episodes.program_episode.ProgramEpisode`. Everything runs on one event loop: the driver's if roles run
in its process, else that of an actor beside the replicas, so that tokens stay away from the driver.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace

from headway.agents.episodes.episode_attempt import CallLog
from headway.agents.episodes.episode_limits import EpisodeClock
from headway.agents.episodes.program_episode import Hosting, MadeEpisode, ProgramEpisode
from headway.agents.episodes.request_dispatcher import (
    Affinity,
    CallEngine,
    PendingRequest,
    RequestDispatcher,
    nothing_sampled,
)
from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import Completion, GenerateRequest, Priority, SamplingParams
from headway.data.journal import CompletionJournal
from headway.data.types import FinishReason, RowAt, RowTokens, Trajectory
from headway.errors import HeadwayError, RunError, WorkerDied, boundary


@dataclass(slots=True, eq=False)
class _OpenGroup:
    """A group that is being made."""

    request: Group
    inbox: asyncio.Queue[Group | HeadwayError]
    """Queue of the `generate` call that asked for the group."""
    samplings: Sequence[SamplingParams]
    """Sampling of each episode, by k; the last one may be the baseline's."""
    affinity: Affinity
    done: dict[int, MadeEpisode] = field(default_factory=dict)
    """Finished episodes of programs, by k."""
    answers: dict[int, tuple[PendingRequest, Completion]] = field(default_factory=dict)
    """Finished episodes of one turn, by k."""
    calls: dict[int, PendingRequest] = field(default_factory=dict)
    """Calls of episodes of one turn, by k."""
    programs: dict[int, tuple[ProgramEpisode, asyncio.Task[None]]] = field(default_factory=dict)
    """Episodes of programs that are not over, by k."""
    aborted: bool = False

    @property
    def oldest_version(self) -> int | None:
        """The oldest version in a finished call; None before the first token."""
        spans = [trajectory.version_spans for trajectory, _ in self.done.values()]
        spans += [finished.version_spans for _, finished in self.answers.values()]
        versions = [version for of_one in spans for _, version in of_one]
        begun = [episode.oldest_version for episode, _ in self.programs.values()]
        return min([*versions, *(version for version in begun if version is not None)], default=None)


@dataclass(eq=False, repr=False)
class EpisodeWorker:
    """`headway.data.interfaces.episode_groups.EpisodeWorkerProtocol` on the running event loop."""

    name: str
    """Name under which replicas know its calls."""
    decode: Callable[[Sequence[int]], str] | None = None
    """Function from an answer's token ids, without its stop token, to its text; None if tokens are simulated."""
    hosting: Hosting | None = None
    """Settings of a user's program; None for the program of one turn."""
    _: KW_ONLY
    gather_s: float = 0.0
    """Minimum seconds between two hand-overs of groups; the last groups are handed on at once."""
    journal: CompletionJournal | None = None
    """Journal of finished calls, from which groups are made again; None without a journal."""

    def __post_init__(self) -> None:
        most = None if self.hosting is None else self.hosting.held_out_at_once
        self._room = None if most is None else asyncio.Semaphore(most)
        """Semaphore for held-out episodes of programs; None for no limit."""
        self._calls = RequestDispatcher(self.name, self.journal)
        self._clock = EpisodeClock()
        self._groups: dict[_OpenGroup, None] = {}
        """Groups that were started and are not over."""
        self._held: dict[_OpenGroup, None] | None = None
        """Groups that wait for `go_on`; None if there is no hold."""
        self._changed = asyncio.Event()
        """Set when a group is over."""
        self._whole: dict[_OpenGroup, None] = {}
        """Complete groups that were not handed on yet."""
        self._hands_on_at = 0.0
        """Time on the loop's clock until which complete groups are collected."""
        self._handing_on: asyncio.TimerHandle | None = None
        self._ended: HeadwayError | None = None

    # ------------------------------------------------------------------------------------- groups

    async def generate(self, requests: Sequence[Group], *, on: str | None = None) -> AsyncGenerator[Group, None]:
        """See `headway.data.interfaces.episode_groups.EpisodeWorkerProtocol.generate`."""
        if self._ended is not None:
            raise self._ended
        if on is not None and not self._calls.knows(on):
            raise WorkerDied(f"{on} is gone")
        inbox: asyncio.Queue[Group | HeadwayError] = asyncio.Queue()
        groups = [_opened(request, inbox, on) for request in requests]
        missing = len(groups)
        if self.journal is not None:  # before the first is started: the files of several groups are read once
            for request in requests:
                if request.again:
                    self.journal.reread(request.number)
        for group in groups:
            if self._held is not None and _trains(group):
                self._held[group] = None
            else:
                self._start(group)
        try:
            while missing:
                finished = await inbox.get()
                if isinstance(finished, HeadwayError):
                    raise finished
                missing -= 1
                yield finished
        finally:
            self._drop(groups)  # for a consumer that leaves early: its calls would decode to their ends

    async def abort_older_than(self, version: int) -> None:
        """See `headway.data.interfaces.episode_groups.EpisodeWorkerProtocol.abort_older_than`."""
        self._abort(
            group
            for group in self._groups
            if _trains(group) and (oldest := group.oldest_version) is not None and oldest < version
        )

    # ------------------------------------------------------------------------------------- replicas

    async def join(self, replica: CallEngine) -> None:
        """See `headway.data.interfaces.episode_groups.EpisodeWorkerProtocol.join`."""
        self._calls.join(replica)

    async def leave(self, replica: str) -> None:
        """See `headway.data.interfaces.episode_groups.EpisodeWorkerProtocol.leave`."""
        await self._calls.leave(replica)

    async def route(self, replicas: Sequence[str], halted: bool = False) -> None:
        """See `headway.data.interfaces.episode_groups.EpisodeWorkerProtocol.route`."""
        if halted:
            self._clock.stop()
        else:
            self._clock.go_on()
        self._calls.route(replicas)

    async def hold(self) -> None:
        """See `headway.data.interfaces.episode_groups.EpisodeWorkerProtocol.hold`."""
        self._held = {} if self._held is None else self._held
        while self._held is not None and any(_trains(group) for group in self._groups):
            self._changed.clear()  # nothing was awaited since the look at the groups: no change is missed
            await self._changed.wait()

    async def go_on(self) -> None:
        """See `headway.data.interfaces.episode_groups.EpisodeWorkerProtocol.go_on`."""
        held, self._held = self._held or {}, None
        self._changed.set()
        for group in held:
            self._start(group)

    def failures(self) -> AsyncGenerator[tuple[str, HeadwayError], None]:
        """See `headway.data.interfaces.episode_groups.EpisodeWorkerProtocol.failures`."""
        return self._calls.failures()

    def end(self, error: HeadwayError) -> None:
        """Raise ``error`` from `generate` from now on, also for calls under way."""
        self._ended = error
        self._hand_on()  # before the error: `generate` reads nothing after it
        groups = [*self._groups, *(self._held or ())]
        for inbox in dict.fromkeys(group.inbox for group in groups):
            inbox.put_nowait(error)
        self._drop(groups)

    async def close(self) -> None:
        """Leave all replicas, and end all programs."""
        self._drop([*self._groups, *self._whole])
        if self._handing_on is not None:
            self._handing_on.cancel()
        await self._calls.close()
        if self.journal is not None:
            self.journal.close()
        if self.hosting is not None:
            await self.hosting.close()

    # ------------------------------------------------------------------------------------- episodes

    def _start(self, group: _OpenGroup) -> None:
        self._groups[group] = None
        for k in range(len(group.samplings)):
            if self.hosting is not None:
                self._begin(group, k, self.hosting)
            else:
                self._ask(group, k)

    def _ask(self, group: _OpenGroup, k: int) -> None:
        """Begin episode ``k`` of one turn: one call."""
        prompt, priority, n = group.request.prompt, group.request.priority, len(group.samplings)
        call = GenerateRequest(
            0, prompt.trajectory_id(k), prompt.token_ids, group.samplings[k], priority=priority, together=n
        )
        group.calls[k] = asked = PendingRequest(
            call,
            group.affinity,
            done=lambda asked, finished: self._on_finished(group, k, asked, finished),
            failed=lambda asked, error: self._on_failed(group, error),
            group=group.request.number,
        )
        self._calls.ask(asked)

    def _on_finished(self, group: _OpenGroup, k: int, asked: PendingRequest, finished: Completion) -> None:
        del group.calls[k]
        if finished.finish_reason is FinishReason.ABORTED:
            self._abort([group])
        if group in self._groups:
            group.answers[k] = asked, finished
            self._over(group)

    def _on_failed(self, group: _OpenGroup, error: HeadwayError) -> None:
        group.inbox.put_nowait(error)
        self._drop([group])

    def _begin(self, group: _OpenGroup, k: int, hosting: Hosting) -> None:
        """Begin episode ``k`` of a user's program."""
        log = CallLog(
            group.request.prompt.trajectory_id(k),
            hosting.sampling(group.samplings[k]),
            group.request.priority,
            group.request.number,
            self._calls,
            group.affinity,
            on_aborted=lambda: self._abort([group]),
            on_failed=lambda error: self._on_failed(group, error),
        )
        episode = ProgramEpisode(group.request, log, hosting, self._clock)
        room = nullcontext() if self._room is None or _trains(group) else self._room

        async def make() -> None:
            try:
                async with room:
                    with boundary(name, RunError):
                        made = await episode.make()
            except HeadwayError as error:
                self._on_failed(group, error)
                return
            group.programs.pop(k, None)
            self._made(group, k, made)

        name = f"{self.name}, episode {tuple(episode.id)}"
        group.programs[k] = episode, asyncio.get_running_loop().create_task(make(), name=name)

    def _made(self, group: _OpenGroup, k: int, made: MadeEpisode) -> None:
        if group in self._groups:
            group.done[k] = made
            self._over(group)

    def _over(self, group: _OpenGroup) -> None:
        """End an episode; the last one ends the group."""
        if len(group.done) + len(group.answers) == len(group.samplings):
            del self._groups[group]
            self._changed.set()
            self._whole[group] = None
            loop = asyncio.get_running_loop()
            # No other running group could be handed on with it, or groups were collected for long enough.
            if not self._groups or loop.time() >= self._hands_on_at:
                self._hand_on()
            elif self._handing_on is None:
                self._handing_on = loop.call_at(self._hands_on_at, self._hand_on)

    def _hand_on(self) -> None:
        """Hand on all complete groups, so that their consumer wakes up once."""
        if self._handing_on is not None:
            self._handing_on.cancel()
            self._handing_on = None
        whole, self._whole = self._whole, {}
        for group in whole:
            try:
                with boundary(f"{self.name}, group {group.request.number}", RunError):
                    finished = _whole(group, self.decode)
            except HeadwayError as error:
                group.inbox.put_nowait(error)
            else:
                group.inbox.put_nowait(finished)
        self._hands_on_at = asyncio.get_running_loop().time() + self.gather_s

    def _abort(self, groups: Iterable[_OpenGroup]) -> None:
        """End ``groups`` as they are; replicas return their partial results."""
        # A list: an ended group is removed from the mapping that is iterated over.
        for group in [group for group in groups if not group.aborted and group in self._groups]:
            group.aborted = True
            for asked in self._calls.abort(list(group.calls.values())):
                self._on_finished(group, asked.request.trajectory.k, asked, nothing_sampled())
            for k, (episode, task) in list(group.programs.items()):
                task.cancel()
                del group.programs[k]
                self._made(group, k, episode.aborted())

    def _drop(self, groups: Iterable[_OpenGroup]) -> None:
        """Forget ``groups``, and cancel their calls."""
        for group in groups:
            if self._held is not None:
                self._held.pop(group, None)
            self._whole.pop(group, None)
            # `self` marks a missing group: the values are None.
            if self._groups.pop(group, self) is self:
                continue
            self._changed.set()
            self._calls.drop(group.calls.values())
            for _, task in group.programs.values():
                task.cancel()


def _opened(request: Group, inbox: asyncio.Queue[Group | HeadwayError], on: str | None) -> _OpenGroup:
    samplings = [request.sampling] * request.n
    if request.baseline_sampling is not None:
        samplings.append(request.baseline_sampling)
    return _OpenGroup(request, inbox, samplings, Affinity(on))


def _trains(group: _OpenGroup) -> bool:
    return group.request.priority is Priority.TRAINING


def _answer(group: _OpenGroup, k: int, decode: Callable[[Sequence[int]], str] | None, index: int) -> MadeEpisode:
    """Return the episode of one turn with answer ``k``. Its row, if it has one, is the group's row ``index``."""
    prompt_ids = group.request.prompt.token_ids
    asked, finished = group.answers[k]
    tokens, length = finished.tokens, finished.length
    ids = [] if tokens is None or decode is None else tokens.ids.tolist()
    if ids and ids[-1] in group.samplings[k].stop_token_ids:
        ids.pop()
    trajectory = Trajectory(
        id=asked.request.trajectory,
        replica=asked.replica,
        text="" if decode is None or not ids else decode(ids),
        prompt_length=len(prompt_ids),
        length=length,
        finish_reason=finished.finish_reason,
        version_spans=finished.version_spans,
        started=finished.started,
        finished=finished.finished,
        rows=(RowAt(index, len(prompt_ids), length),) if length else (),
    )
    return trajectory, [RowTokens.answer(prompt_ids, tokens)] if length and tokens is not None else []


def _whole(group: _OpenGroup, decode: Callable[[Sequence[int]], str] | None) -> Group:
    """Put the episodes of ``group`` together, in order of k, and number their rows.

    All answers are decoded here at once, so that each costs little when it arrives.
    """
    trajectories: list[Trajectory] = []
    rows: list[RowTokens] = []
    count, simulated = 0, False
    for k in range(len(group.samplings)):
        if group.done:
            trajectory, own = group.done[k]
            trajectory.rows = tuple(replace(at, index=count + n) for n, at in enumerate(trajectory.rows))
        else:
            trajectory, own = _answer(group, k, decode, count)
        simulated |= len(own) < len(trajectory.rows)
        trajectories.append(trajectory)
        count += len(trajectory.rows)
        rows += own
    return replace(group.request, trajectories=tuple(trajectories), tokens=None if simulated else tuple(rows))


@asynccontextmanager
async def local_episode_worker(
    *engines: CallEngine,
    decode: Callable[[Sequence[int]], str] | None = None,
    hosting: Hosting | None = None,
    name: str = "episode-worker",
) -> AsyncIterator[EpisodeWorker]:
    """Yield an episode worker of ``engines``, all of which take calls. An engine that fails ends each `generate`.

    async with local_episode_worker(engine, decode=tokenizer.decode) as worker:
        async for group in worker.generate(requests):
            ...
    """
    worker = EpisodeWorker(name, decode, hosting)
    for engine in engines:
        await worker.join(engine)
    await worker.route([engine.name for engine in engines])

    async def watch() -> None:
        async for _, error in worker.failures():
            worker.end(error)

    watching = asyncio.get_running_loop().create_task(watch())
    try:
        yield worker
    finally:
        watching.cancel()
        await worker.close()
