"""The nouns of the pipeline: prompt, trajectory, group, training sample. Plain data; numpy, never torch.

Token arrays stay behind a `Handle` once a group left its engine: the driver reads metadata only and passes handles on,
so a group's tokens travel from the process that sampled them to the process that trains on them, and nowhere else. A
handle is whatever the cluster backend makes of it: the object itself (inline) or a Ray object reference.

Shape suffixes: P prompt tokens, T response tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar, Union

import numpy as np
from numpy.typing import NDArray

from headway.errors import RunError

T = TypeVar("T")
Handle = Union[T, Any]  # noqa: UP007 - a generic alias needs this spelling on Python 3.11
"""An opaque reference to a ``T`` that may live in another process."""


class ColumnName(StrEnum):
    """Name of a column, which holds one number for each response token of a trajectory."""

    ADVANTAGES = "advantages"
    RETURNS = "returns"
    VALUES = "values"
    REF_LOGPROBS = "ref_logprobs"
    PROX_LOGPROBS = "prox_logprobs"


class TrajectoryId(NamedTuple):
    """A trajectory's identity: the ``attempt``-th run of ``row`` in ``epoch``, answer ``k``. Keys its randomness."""

    epoch: int
    row: int
    attempt: int
    k: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the data set, tokenised."""

    epoch: int
    row: int
    attempt: int
    source: str
    """Name of the data source, for the reward and for per-source metrics."""
    text: str
    """The text that the model reads (after the chat template)."""
    token_ids: NDArray[np.int32]
    """Token ids of the prompt, [P]."""
    answer: Any = None
    """Ground truth, handed to the reward as it is."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the row, by name."""
    messages: list[dict[str, Any]] | None = None
    """The prompt as chat messages, where the row gives it so."""

    def trajectory_id(self, k: int) -> TrajectoryId:
        return TrajectoryId(self.epoch, self.row, self.attempt, k)


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens that one call of the policy has sampled. All arrays are [T]."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    """Log-prob (nats) under the very distribution the token was sampled from (temperature and filters applied)."""
    versions: NDArray[np.int32]
    """Version of the weights that sampled the token, stamped by the engine."""

    @classmethod
    def nothing(cls) -> SampledTokens:
        """Make an empty one: nothing sampled yet."""
        return cls(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))


@dataclass(frozen=True, slots=True)
class ResponseTokens:
    """One response, token by token. All arrays are [T]."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    """Log-prob (nats) under the very distribution the token was sampled from (temperature and filters applied)."""
    versions: NDArray[np.int32]
    """Version of the weights that sampled the token, stamped by the engine."""
    loss_mask: NDArray[np.bool_]
    """True where the policy wrote the token (everywhere, unless text was inserted)."""


@dataclass(frozen=True, slots=True)
class GroupTokens:
    """The tokens behind a group's handle: the shared prompt [P] and each trajectory's response."""

    prompt_ids: NDArray[np.int32]
    responses: tuple[ResponseTokens, ...]


def version_spans(versions: NDArray[np.int32]) -> list[list[int]]:
    """``[[start, version], …]`` of a [T] array of versions: where each run of equal versions starts."""
    if len(versions) == 0:
        return []
    if (versions == versions[0]).all():
        return [[0, int(versions[0])]]
    starts = np.flatnonzero(np.diff(versions, prepend=versions[0] - 1))
    return [[int(s), int(versions[s])] for s in starts]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Metadata of one response: what the driver may look at. Its tokens are behind ``group.responses[k]``."""

    id: TrajectoryId
    replica: str
    text: str
    prompt_length: int
    length: int
    """Response tokens, end-of-sequence included."""
    finish_reason: FinishReason
    version_spans: list[list[int]]
    started: float
    """Time on the event clock, in seconds, at which the first token was sampled."""
    finished: float

    @property
    def oldest_version(self) -> int | None:
        """The oldest version of its tokens; None for a trajectory without tokens."""
        spans = self.version_spans
        return spans[0][1] if len(spans) == 1 else min((version for _, version in spans), default=None)


@dataclass(frozen=True, slots=True)
class ResponseAt:
    """The place of one response's tokens: ``responses[index]`` of the `GroupTokens` behind ``tokens``."""

    tokens: Handle[GroupTokens]
    index: int


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The outcomes of the trajectories of one fetch, in the order of its samples [S]."""

    ids: tuple[TrajectoryId, ...]
    rewards: NDArray[np.float32]
    groups: NDArray[np.int64]
    """Number of each sample's group, [S]."""
    finished: NDArray[np.bool_]
    """False for each sample whose answer was cut off, [S]."""
    baselines: NDArray[np.float32] | None = None
    """Reward of the greedy answer to each sample's prompt, [S], where one was generated."""


@dataclass(slots=True)
class Group:
    """One prompt with its ``rollout.n`` trajectories: the unit that streams. ``number`` counts admissions from 0."""

    number: int
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    """The group's trajectories, in order of k."""
    responses: tuple[ResponseAt, ...]
    """Place of each trajectory's tokens: all behind one handle, unless the group was split over replicas."""
    rewards: NDArray[np.float32] | None = None
    """Reward of each trajectory, [n]; set by the stage Reward."""
    baseline: float | None = None
    """The reward of the policy's greedy answer, where one was generated (ReMax)."""
    columns: dict[str, tuple[Column, ...]] = field(default_factory=dict)
    """The numbers computed per token, by name: one [T] column per trajectory. See `Sample.columns`."""

    def samples(self, columns: Collection[str] = (), *, mask_cut_off: bool = False) -> list[Sample]:
        """The samples of the group for a forward or training step, with those of ``columns`` that it has.

        ``mask_cut_off``: answers that did not end by themselves are in no loss (overlong filtering).
        """
        return [
            Sample(
                tokens=at.tokens,
                k=at.index,
                prompt_length=trajectory.prompt_length,
                length=trajectory.length,
                columns={name: self.columns[name][k] for name in columns if name in self.columns},
                finished=trajectory.finish_reason is FinishReason.STOP,
                masked=mask_cut_off and trajectory.finish_reason is not FinishReason.STOP,
            )
            for k, (at, trajectory) in enumerate(zip(self.responses, self.trajectories, strict=True))
        ]

    @property
    def oldest_version(self) -> int:
        """The oldest version that sampled any of the group's tokens. Raises `RunError` for a group without tokens."""
        versions = [oldest for t in self.trajectories if (oldest := t.oldest_version) is not None]
        if not versions:
            ends = ", ".join(t.finish_reason for t in self.trajectories)
            raise RunError(
                f"group {self.number}: none of its {len(self.trajectories)} trajectories has a token ({ends}), so it "
                "has no version of weights. Such a group cannot be trained on; its engine should not have delivered it"
            )
        return min(versions)


@dataclass(frozen=True, slots=True)
class Column:
    """A [T] float32 array of one trajectory that may live elsewhere: item ``index`` of the list behind ``handle``."""

    handle: Handle[list[NDArray[np.float32]]]
    index: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory on its way through a forward or training step."""

    tokens: Handle[GroupTokens]
    k: int
    """Index of the response among those behind ``tokens``."""
    prompt_length: int
    length: int
    columns: Mapping[str, Column] = field(default_factory=dict)
    """Further per-token inputs, by name: ``ref_logprobs``, ``prox_logprobs``, ``values``, ``advantages``, ``returns``.
    """
    finished: bool = True
    """False where the answer was cut off."""
    masked: bool = False
    """True if the sample is in no loss: none of its tokens counts."""

    @property
    def total_length(self) -> int:
        """Number of tokens P + T, which is what the sample costs in a token-budget micro-batch."""
        return self.prompt_length + self.length
