"""Prompts, groups of episodes, the workers that make the groups by calls to replicas, and scores of responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headway.data.interfaces.rollout import Priority, RolloutEngine, SamplingParams
from headway.data.types import (
    AnyColumn,
    Conversation,
    FinishReason,
    GroupTokens,
    Handle,
    Prompt,
    TrainSample,
    Trajectory,
)
from headway.errors import HeadwayError, RunError
from headway.records import pickled_by_fields


@pickled_by_fields
@dataclass(slots=True)
class Group:
    """One prompt with its episodes: the unit that streams, from admission to training.

    Its episodes have the ids ``prompt.trajectory_id(k)`` for k in 0 … n − 1.

    admitted ─▶ made: trajectories, tokens ─▶ scored: rewards, baseline ─▶ columns ─▶ samples
    """

    number: int
    """Number of the admission, from 0; for validation, the problem's index (never mixed: see ``priority``)."""
    prompt: Prompt
    n: int
    """Number of episodes to train on."""
    sampling: SamplingParams
    priority: Priority = Priority.TRAINING
    baseline_sampling: SamplingParams | None = None
    """Sampling of one more episode, k = n, which is not trained on; None without one."""
    shown: bool = False
    """True if a sample of the group is shown: its episodes then always include their conversations."""
    trajectories: tuple[Trajectory, ...] = ()
    """One trajectory for each episode, in order of k; after scoring, only those to train on."""
    tokens: Handle[GroupTokens] | None = None
    """Handle of the tokens; None if they are simulated, or not for training."""
    rewards: NDArray[np.float32] | None = None
    """Each trajectory's own reward, beside those of its turns, [n]; set by the stage Reward."""
    baseline: float | None = None
    """Score of the policy's greedy episode, rewards of its turns included; None if none was generated. For ReMax."""
    columns: dict[str, tuple[AnyColumn, ...]] = field(default_factory=dict)
    """The numbers computed per token, by name: one [T] column per row, in the order of `samples`."""
    again: bool = False
    """True if an earlier episode worker of the group was lost: the journal may have its calls."""

    def samples(self, columns: Collection[str] = (), *, mask_cut_off: bool = False) -> list[TrainSample]:
        """Return the group's samples for a forward or training step, with the columns of ``columns`` that exist.

        There is one for each row of each trajectory, in order. ``mask_cut_off``: exclude episodes that did not end by
        themselves from the loss (overlong filtering).
        """
        samples: list[TrainSample] = []
        present = {name: self.columns[name] for name in columns if name in self.columns}
        for trajectory in self.trajectories:
            ended_itself = trajectory.finish_reason is FinishReason.STOP and trajectory.limit is None
            for at in trajectory.rows:
                # Columns have this order; `at.index` also counts rows of `tokens` that are not trained.
                place = len(samples)
                samples.append(
                    TrainSample(
                        tokens=self.tokens,
                        index=at.index,
                        prompt_length=at.prompt_length,
                        length=at.length,
                        episode=trajectory.id,
                        columns={name: of_rows[place] for name, of_rows in present.items()},
                        finished=ended_itself,
                        masked=mask_cut_off and not ended_itself,
                    )
                )
        return samples

    @property
    def oldest_version(self) -> int:
        """The oldest version that sampled any of the group's tokens. Raises `RunError` for a group without tokens."""
        versions = [version for t in self.trajectories for _, version in t.version_spans]
        if not versions:
            ends = ", ".join(t.finish_reason for t in self.trajectories)
            raise RunError(f"group {self.number} has no token ({ends}), and so no version: it cannot be trained on")
        return min(versions)


class EpisodeWorkerProtocol(Protocol):
    """Worker that makes groups' episodes with calls to replicas, and keeps the sampled tokens.

        await worker.join(replica)
        await worker.route([replica.name])              # new calls go to these
        async for group in worker.generate([Group(0, prompt, n=8, sampling=sampling)]):
            ...                                         # each group when its last episode is over

    After `leave`, the calls of that replica are repeated on another one.
    """

    name: str

    def generate(self, requests: Sequence[Group], *, on: str | None = None) -> AsyncGenerator[Group, None]:
        """Start all groups in one step, in order, and yield each when it is done.

        Leaving the iterator early drops the groups that it has not yielded. Aborted groups are yielded too, with finish
        reason ``aborted``. ``on``: the only replica for all calls of these groups; raises `WorkerDied` when it leaves.
        Raises `DataError` for a prompt that no engine takes.
        """

    async def join(self, replica: RolloutEngine) -> None:
        """Connect to ``replica``, which gets calls once `route` names it."""

    async def leave(self, replica: str) -> None:
        """Repeat the unfinished calls of the lost ``replica`` on others."""

    async def route(self, replicas: Sequence[str], halted: bool = False) -> None:
        """Send new calls only to these replicas. ``halted``: calls wait there, and the episodes' clocks are paused."""

    async def hold(self) -> None:
        """Start no further training groups. Returns when all started ones are done, or `go_on` was called."""

    async def go_on(self) -> None:
        """Start the groups that were held back, and new ones again."""

    async def abort_older_than(self, version: int) -> None:
        """End the training groups that have a token of a version below ``version`` in a finished call."""

    def failures(self) -> AsyncGenerator[tuple[str, HeadwayError], None]:
        """Yield the name of each replica that failed or refused a call's transport, and the reason."""

    async def close(self) -> None: ...


@pickled_by_fields
@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Scores of one group's n responses, in order."""

    rewards: NDArray[np.float32]
    """Rewards [n], all finite: Σ weight · value over the parts that apply to the response."""
    parts: Mapping[str, list[float | None]] = field(default_factory=dict)
    """Name of a reward component, or of another number that it returned → values [n], before weighting. None: the
    component does not apply to the response, or did not return this number."""


def means_of_parts(groups: Iterable[Mapping[str, Sequence[float | None]]]) -> dict[str, float]:
    """Return each reward component's mean over the responses that it applies to; empty if there is only one."""
    found: dict[str, list[float]] = {}
    for parts in groups:
        for name, values in parts.items():
            found.setdefault(name, []).extend(value for value in values if value is not None)
    return {name: fmean(given) for name, given in found.items() if given} if len(found) > 1 else {}


class RewardFn(Protocol):
    """Reward function that scores responses in other processes.

    scores = await reward.score(prompt, ["4", "5"])
    scores.rewards                      # array([1., 0.], dtype=float32)
    await reward.close()
    """

    async def score(
        self, prompt: Prompt, responses: Sequence[str], conversations: Sequence[Conversation] | None = None
    ) -> Scores:
        """Return the rewards of the responses, and the values of each component.

        ``conversations``: the conversations that end with the responses, if a program made them; else None.

        Raises `ScoringFailed` after the retry budget: an exception, a time-out, or a value that is not a finite number.
        """

    async def close(self) -> None: ...


class PromptSource(Protocol):
    """Source of prompts in a seeded order, epoch after epoch; its position can be saved and restored.

    A cursor restores the position, and a prompt can be found by epoch and row:

        first, cursor = source.next(), source.state()
        second = source.next()
        source.restore(cursor)
        assert source.next() == second == source.find(second.epoch, second.row)
    """

    def next(self) -> Prompt | None:
        """Return the next prompt, or None when all epochs are over (never None if epochs are unlimited)."""

    def again(self, prompt: Prompt) -> Prompt:
        """Return the prompt of the same row as a new attempt, with its own random numbers."""

    def state(self) -> dict[str, Any]:
        """Return the cursor: JSON values that `restore` takes."""

    def find(self, epoch: int, row: int) -> Prompt | None:
        """Return the prompt of ``row`` in ``epoch``; None if the data do not have it any more."""

    def restore(self, state: Mapping[str, Any]) -> None: ...
