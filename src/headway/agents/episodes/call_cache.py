"""The log of one episode's calls of the policy: a call that is asked for again is not made again.

    call(prompted) ──its key is known?──yes──▶ the call's result, whether it is there or still awaited
                              └──no──▶ a call of the policy ──▶ a replica

A call is asked for again where its turn was given up, since nobody waited for the answer, and where its program is run
again from the beginning. Nothing has to tell: keys are made of contexts, and of what ends the call
(`headway.agents.episodes.episode_attempt`). What is asked otherwise than before is sampled anew, and calls go where the
episode's prefix is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from headway.agents.episodes.episode_tokens import Prompted
from headway.agents.episodes.request_dispatcher import Affinity, PendingRequest, RequestDispatcher
from headway.data.interfaces.generation import FinishedCall, Priority, SamplingParams
from headway.data.types import FinishReason, TrajectoryId
from headway.errors import HeadwayError, WorkerDied
from headway.runtime.task_groups import failure_ignored


@dataclass(slots=True, eq=False)
class _Logged:
    """A call that some attempt of the program has made."""

    result: asyncio.Future[FinishedCall]
    asked: PendingRequest | None = None
    """The call while it is not finished; afterwards None, since it holds the whole context."""


class CallLog:
    """The calls of one episode."""

    def __init__(
        self,
        id: TrajectoryId,
        sampling: SamplingParams,
        priority: Priority,
        calls: RequestDispatcher,
        home: Affinity,
        on_aborted: Callable[[], object],
        on_failed: Callable[[HeadwayError], None],
    ) -> None:
        """
        Args:
            home: of the group, for the first call.
            on_aborted: called when an engine has ended a call of this episode.
            on_failed: called when no engine takes a call of this episode, with the reason.
        """
        self.id, self.sampling = id, sampling
        self.cut: list[FinishedCall] = []
        """Results of calls that engines ended themselves."""
        self._priority = priority
        self._calls = calls
        self._home = home
        self._on_aborted = on_aborted
        self._on_failed = on_failed
        self._log: dict[int, _Logged] = {}
        """Calls by their keys."""
        self._replicas: dict[str, None] = {}
        """Replicas that may keep a prefix of this episode."""

    @property
    def replica(self) -> str:
        """The replica of the last result; empty before the first."""
        return next(reversed(self._replicas), "")

    def call(
        self, prompted: Prompted, max_tokens: int, stop: tuple[str, ...] = (), stop_token_ids: tuple[int, ...] = ()
    ) -> asyncio.Future[FinishedCall]:
        """Call the policy, or return the logged call. Cancelling the wait does not cancel the call.

        ``stop``, ``stop_token_ids``: strings and tokens that end it, beside the sampling's own.
        """
        logged = self._log.get(prompted.key)
        if logged is None:
            logged = _Logged(failure_ignored(asyncio.get_running_loop().create_future()))
            logged.asked = PendingRequest(
                self.id,
                prompted.ids,
                self._ended_by(max_tokens, stop, stop_token_ids),
                self._home,
                done=partial(self._finished, logged),
                failed=partial(self._refused, logged),
                priority=self._priority,
                key=prompted.key if self._log else 0,
                goes_on=True,
            )
            self._log[prompted.key] = logged
            self._calls.ask(logged.asked)
        return asyncio.shield(logged.result)

    def close(self) -> None:
        """End what is under way: the episode is over."""
        open_calls = [logged.asked for logged in self._log.values() if logged.asked is not None]
        self._calls.drop(open_calls)
        self._replicas.update({asked.replica: None for asked in open_calls if asked.replica})
        self._calls.release(self.id, self._replicas)

    def _ended_by(self, max_tokens: int, stop: tuple[str, ...], stop_token_ids: tuple[int, ...]) -> SamplingParams:
        own = self.sampling
        if own.min_tokens:  # these would not be sampled before so many tokens, which training knows nothing of
            stop_token_ids = ()
        return replace(
            own,
            max_tokens=max_tokens,
            min_tokens=min(own.min_tokens, max_tokens),
            stop=tuple(dict.fromkeys((*own.stop, *stop))),
            stop_token_ids=tuple(dict.fromkeys((*own.stop_token_ids, *stop_token_ids))),
        )

    def _refused(self, logged: _Logged, asked: PendingRequest, error: HeadwayError) -> None:
        """End a call that no engine takes: that is its episode's failure, unless the one replica for it is gone."""
        logged.asked = None
        if isinstance(error, WorkerDied):
            self._on_failed(error)
        elif not logged.result.done():
            logged.result.set_exception(error)

    def _finished(self, logged: _Logged, asked: PendingRequest, finished: FinishedCall) -> None:
        logged.asked = None
        self._replicas[asked.replica] = None
        if self._home.on is None:
            self._home = Affinity(replica=asked.replica)
        if finished.finish_reason is FinishReason.ABORTED:
            self.cut.append(finished)
            # Once all results are read that came with this one: an engine ends the calls of a group together.
            asyncio.get_running_loop().call_soon(self._on_aborted)
        elif not logged.result.done():
            logged.result.set_result(finished)
