"""Reward workers: processes that score groups, with time limits and retries (a `RewardFn` of the pipeline).

    score(prompt, responses) ─▶ one job per group ─▶ worker ─▶ n floats, and each part's values
           ▲                          │ exception, time-out, nonsense, death of the worker
           └── retry, then ScoringFailed(reason) ◀─┘

A call that takes too long ends its process (`runtime.workers.user_code_boundary.killed_after`); an asynchronous one is
cancelled. A second, longer limit on the whole group catches calls that the first one missed. If all functions are
asynchronous, groups share processes. Rewards that only compare two texts are scored here, without any process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headway.agents.rewards.score_request import ScoreRequest
from headway.agents.rewards.scorers import RewardSpec, Scorer
from headway.data.interfaces.episode_groups import Scores
from headway.errors import RunnerLost, ScoringFailed, ScoringTimedOut, UserCodeFailed
from headway.runtime.workers.worker_pool import WorkerPool

if TYPE_CHECKING:
    from headway.data.types import Conversation, Prompt

START_TIMEOUT_S = 120.0
"""Limit in seconds for a worker to start and load the reward; ``reward.timeout_s`` if that is longer."""
GRACE_S = 1.0
"""Seconds by which the limit on a group exceeds the sum of its calls' limits."""
AT_ONCE = 16
"""Maximum number of concurrent groups in a process, if all functions are asynchronous."""
MOST_LOSSES = 8
"""Number of times, beyond its retries, that a group is scored again because another group ended their process."""


@dataclass(eq=False, repr=False)
class RewardWorkers:
    """Scores groups in ``workers`` processes. Use from one event loop.

    Making one is free; `start` or the first `score` starts the processes.
    """

    spec: RewardSpec
    _: KW_ONLY
    workers: int
    retries: int
    log_path: Path | None
    """File for the output of processes; None for this process's stderr."""
    on_timeout: Callable[[int], object] | None = None
    """Called at each time-out, with the number of time-outs so far."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables."""

    def __post_init__(self) -> None:
        self._spec = replace(self.spec, workers=self.workers)
        self._pool = self._make_pool()
        self._scorer: Scorer | None = None
        """Scorer in this process, once it is loaded, if the rewards need no other process."""
        self._timeouts = 0

    async def load(self) -> None:
        """Load the reward in a worker. If all functions are asynchronous, that worker ends again: `start` starts
        workers that groups share. Otherwise it stays, and further workers start when they are needed.

        Raises:
            ConfigError: unknown reward or task, or parameters that it does not take.
            UserCodeError: the user's file does not import, lacks the function, or the function's parameters do not fit.
            WorkerDied: the process ended, or did not get ready in time.
        """
        if not self._spec.needs_process:
            self._scorer = self._spec.load()
        elif await self._pool.start() and not self._spec.shared:
            # Processes that score one group at a time have no event loop: groups cannot share them.
            await self._pool.close()
            self._spec = replace(self._spec, shared=True)
            self._pool = self._make_pool()

    async def start(self) -> None:
        """Load the reward, and start all workers that groups share. Raises as `load`."""
        await self.load()
        if self._spec.shared:
            await self._pool.start()

    def _make_pool(self) -> WorkerPool:
        return WorkerPool(
            "reward worker",
            self._spec,
            processes=self._spec.workers,
            at_once=AT_ONCE if self._spec.shared else 1,
            stall_s=self._spec.timeout_s + GRACE_S,
            log_path=self.log_path,
            env=self.env,
            start_timeout_s=max(START_TIMEOUT_S, self._spec.timeout_s),
        )

    async def score(
        self, prompt: Prompt, responses: Sequence[str], conversations: Sequence[Conversation] | None = None
    ) -> Scores:
        """Return the rewards, and the values of each part.

        ``conversations``: see `headway.data.interfaces.episode_groups.RewardFn.score`.

        Raises `ScoringFailed` with a short reason when every attempt failed: ``exception: ValueError: …``,
        ``timeout after 10 s``, ``returned nan for response 3, …``, ``worker ended with exit code 1``. Of several parts,
        the name of the one that failed comes first, unless its process ended.
        """
        if not responses:
            return Scores(np.zeros(0, np.float32), {part.name: [] for part in self._spec.parts})
        request = ScoreRequest(
            prompt.text,
            list(responses),
            prompt.answer,
            prompt.source,
            dict(prompt.extra),
            messages=prompt.messages,
            conversations=None if conversations is None else list(conversations),
        )
        tries_left, losses_left = self.retries, MOST_LOSSES
        while True:
            try:
                return await self._try(request)
            except ScoringFailed as failure:
                # An attempt lost because of another group's code uses up no retry of this group.
                if losses_left and self._is_anothers(failure.__cause__):
                    losses_left -= 1
                elif tries_left:
                    tries_left -= 1
                else:
                    raise

    def _is_anothers(self, cause: BaseException | None) -> bool:
        """Tell whether an attempt failed because another group ended the process that both shared."""
        if not isinstance(cause, RunnerLost) or not self._spec.shared:
            return False
        return cause.culprit is False and not cause.timed_out

    async def close(self) -> None:
        """End all processes, busy or not. Scores still awaited fail."""
        await self._pool.close()

    async def _try(self, request: ScoreRequest) -> Scores:
        if not self._spec.needs_process:
            self._scorer = self._scorer or self._spec.load()
            return await self._scorer.serve(request)
        # One call more if groups share a process: the check for a blocked loop, which names the group, must come first.
        calls = len(request.responses) + (1 if self._spec.shared else 0)
        limit = calls * sum(map(self._spec.limit_s, self._spec.parts)) + GRACE_S
        try:
            scores: Scores = await self._pool.run(request, timeout_s=limit)
            return scores
        except RunnerLost as lost:
            if lost.timed_out:
                shortest = min(map(self._spec.limit_s, self._spec.parts))
                raise self._timed_out(f"timeout after {shortest:g} s") from lost
            raise ScoringFailed(f"worker ended with {lost.end}" if lost.end else f"worker: {lost}") from lost
        except ScoringTimedOut as late:
            raise self._timed_out(str(late)) from late
        except UserCodeFailed as failure:  # such as a reward that closed its process's connection
            raise ScoringFailed(f"worker: {failure}") from failure

    def _timed_out(self, reason: str) -> ScoringFailed:
        self._timeouts += 1
        if self.on_timeout is not None:
            self.on_timeout(self._timeouts)
        return ScoringFailed(reason)
