"""The log of one episode's calls of the policy, by which its program can be run again.

    call(prompted) ──known, same context?──yes──▶ the call's result, whether it is there or still awaited
                              └──no──▶ a call of the policy ──▶ a replica

Whatever a program asks otherwise than before is sampled anew; calls go where the episode's prefix is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import xxhash

from headway.concurrently import failure_ignored
from headway.data.types import FinishReason, TrajectoryId
from headway.episodes.calls import Asked, Calls, Home
from headway.episodes.record import Prompted
from headway.errors import HeadwayError, RunError, WorkerDied
from headway.interfaces import FinishedCall, Priority, SamplingParams


@dataclass(slots=True, eq=False)
class _Logged:
    """A call that was made, at whatever try of the program."""

    context: bytes
    """Digest of the context."""
    result: asyncio.Future[FinishedCall]
    asked: Asked | None
    """The call while it is not finished; afterwards None, since it holds the whole context."""


class CallLog:
    """The calls of one episode."""

    def __init__(
        self,
        id: TrajectoryId,
        sampling: SamplingParams,
        priority: Priority,
        calls: Calls,
        home: Home,
        on_aborted: Callable[[], object],
        on_failed: Callable[[HeadwayError], None],
    ) -> None:
        """
        Args:
            home: of the group, for the first call.
            on_aborted: called when an engine has ended a call of this episode.
            on_failed: called when no engine takes a call of this episode, with the reason.
        """
        self.cut: list[FinishedCall] = []
        """Results of calls that engines ended themselves."""
        self._id = id
        self._sampling = sampling
        self._priority = priority
        self._calls = calls
        self._home = home
        self._on_aborted = on_aborted
        self._on_failed = on_failed
        self._log: dict[int, _Logged] = {}
        self._replicas: dict[str, None] = {}
        """Replicas that may keep a prefix of this episode."""

    @property
    def replica(self) -> str:
        """The replica of the last result; empty before the first."""
        return next(reversed(self._replicas), "")

    async def call(
        self, prompted: Prompted, max_tokens: int, stop: tuple[str, ...] = (), stop_token_ids: tuple[int, ...] = ()
    ) -> FinishedCall:
        """Call the policy, unless the log knows the call.

        ``stop``, ``stop_token_ids``: strings and tokens that end it, beside the sampling's own.
        """
        logged, context = self._log.get(prompted.key), xxhash.xxh3_128_digest(prompted.ids.tobytes())
        if logged is None or logged.context != context:
            if logged is not None:
                self._drop(logged)
                if not logged.result.done():
                    logged.result.set_exception(RunError("the call of this turn was made anew with another context"))
            logged = _Logged(context, failure_ignored(asyncio.get_running_loop().create_future()), None)
            self._log[prompted.key] = logged
            self._ask(logged, prompted, self._ended_by(max_tokens, stop, stop_token_ids))
        return await asyncio.shield(logged.result)

    def close(self) -> None:
        """End what is under way: the episode is over."""
        for logged in self._log.values():
            self._drop(logged)
        self._calls.release(self._id, self._replicas)

    def _ended_by(self, max_tokens: int, stop: tuple[str, ...], stop_token_ids: tuple[int, ...]) -> SamplingParams:
        own = self._sampling
        if own.min_tokens:  # these would not be sampled before so many tokens, which training knows nothing of
            stop_token_ids = ()
        return replace(
            own,
            max_tokens=max_tokens,
            min_tokens=min(own.min_tokens, max_tokens),
            stop=tuple(dict.fromkeys((*own.stop, *stop))),
            stop_token_ids=tuple(dict.fromkeys((*own.stop_token_ids, *stop_token_ids))),
        )

    def _ask(self, logged: _Logged, prompted: Prompted, sampling: SamplingParams) -> None:
        logged.asked = Asked(
            self._id,
            prompted.ids,
            sampling,
            self._home,
            done=lambda asked, finished: self._finished(logged, asked, finished),
            failed=lambda asked, error: self._refused(logged, error),
            priority=self._priority,
            key=prompted.key,
            goes_on=True,
        )
        self._calls.ask(logged.asked)

    def _refused(self, logged: _Logged, error: HeadwayError) -> None:
        """End a call that no engine takes: that is its episode's failure, unless the one replica for it is gone."""
        logged.asked = None
        if isinstance(error, WorkerDied):
            self._on_failed(error)
        elif not logged.result.done():
            logged.result.set_exception(error)

    def _drop(self, logged: _Logged) -> None:
        """Forget a call that is not finished, whose replica may keep a prefix for it."""
        if logged.asked is not None:
            self._calls.drop([logged.asked])
            if logged.asked.replica:
                self._replicas[logged.asked.replica] = None
            logged.asked = None

    def _finished(self, logged: _Logged, asked: Asked, finished: FinishedCall) -> None:
        logged.asked = None
        self._replicas[asked.replica] = None
        if self._home.on is None:
            self._home = Home(replica=asked.replica)
        if finished.finish_reason is FinishReason.ABORTED:
            self.cut.append(finished)
            # Once all results are read that came with this one: an engine ends the calls of a group together.
            asyncio.get_running_loop().call_soon(self._on_aborted)
        elif not logged.result.done():
            logged.result.set_result(finished)
