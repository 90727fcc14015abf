"""Data types of the pipeline: prompt, trajectory, row, training sample. Plain data; numpy, never torch.

The group is in `headway.data.interfaces.episode_groups`.

Token arrays stay behind a `Handle` once a group left its engine: the driver reads only metadata and passes handles on,
so tokens travel directly from the process that sampled them to the process that trains on them. The cluster backend
chooses the kind of handle: the object itself (inline), a file in memory (tokens on Ray) or a Ray object reference
(columns).

Shape suffixes: P prompt tokens, T response tokens.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar, Union

import numpy as np
from numpy.typing import NDArray

from headway.records import pickled_by_fields, record

T = TypeVar("T")
Handle = Union[T, Any]  # noqa: UP007 - a generic alias needs this spelling on Python 3.11
"""An opaque reference to a ``T`` that may live in another process."""


class ColumnName(StrEnum):
    """Name of a column, which holds one number for each response token of a row."""

    ADVANTAGES = "advantages"
    RETURNS = "returns"
    VALUES = "values"
    REF_LOGPROBS = "ref_logprobs"
    PROX_LOGPROBS = "prox_logprobs"


class TrajectoryId(NamedTuple):
    """Identity of a trajectory: the ``attempt``-th run of ``row`` in ``epoch``, episode ``k``. Keys its randomness."""

    epoch: int
    row: int
    attempt: int
    k: int


@pickled_by_fields
@dataclass(frozen=True, slots=True)
class Prompt:
    """One tokenised row of the data set."""

    epoch: int
    row: int
    attempt: int
    source: str
    """Name of the data source, for the reward and for per-source metrics."""
    text: str
    """The text that the model reads, after the chat template."""
    token_ids: NDArray[np.int32]
    """Token ids of the prompt, [P]."""
    answer: Any = None
    """Ground truth, passed to the reward unchanged."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the row, by name."""
    messages: list[dict[str, Any]] | None = None
    """The prompt as chat messages; None if the row has text."""
    asked: str | None = None
    """The row's text if it differs from ``text``: the chat template made a message of it."""

    @property
    def data_text(self) -> str | None:
        """The row's text, without the chat template; None if the row has messages."""
        return None if self.messages is not None else self.text if self.asked is None else self.asked

    @property
    def question(self) -> str:
        """The prompt as a person sees it, without the chat template: the user's last message, or the row's text."""
        for message in reversed(self.messages or []):
            if message["role"] == "user" and isinstance(message["content"], str):
                return message["content"]
        return self.text if self.asked is None else self.asked

    @property
    def group_id(self) -> tuple[int, int, int]:
        """Identity of the prompt's group: epoch, row and attempt, the common beginning of its trajectories' ids."""
        return self.epoch, self.row, self.attempt

    def trajectory_id(self, k: int) -> TrajectoryId:
        return TrajectoryId(self.epoch, self.row, self.attempt, k)


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@record
class SampledTokens:
    """Tokens sampled by one call of the policy. All arrays are [T].

    They are pickled as one byte string: a separate array costs more to pickle than all tokens of an answer.
    """

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    """Log-prob (nats) under the distribution from which the token was sampled (temperature and filters applied)."""
    versions: NDArray[np.int32]
    """Version of the weights that sampled each token, set by the engine."""

    @classmethod
    def nothing(cls) -> SampledTokens:
        """Make an empty object: nothing sampled yet."""
        return cls(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))

    def __reduce__(self) -> tuple[Callable[..., SampledTokens], tuple[bytearray]]:
        # `_sampled_tokens` reads these dtypes: 4 bytes each, whatever dtype an engine has sampled into
        parts = (self.ids, np.int32), (self.logprobs, np.float32), (self.versions, np.int32)
        return _sampled_tokens, (bytearray().join([array.astype(kind, copy=False).tobytes() for array, kind in parts]),)


def _sampled_tokens(data: bytearray) -> SampledTokens:
    # From a bytearray: arrays over bytes would be read-only.
    length = len(data) // 12
    return SampledTokens(
        np.frombuffer(data, np.int32, length),
        np.frombuffer(data, np.float32, length, 4 * length),
        np.frombuffer(data, np.int32, length, 8 * length),
    )


class TurnSpan(NamedTuple):
    """Place ``[start, stop)`` of one turn's sampled tokens in a row's arrays, those of its response unless said
    otherwise.
    """

    number: int
    """The turn's number in its episode, from 0."""
    start: int
    stop: int
    state: int = 0
    """State in which the turn was taken, as a signed 64-bit key: equal if the policy's last input was the same, or if
    programs give the same name. 0 if the episode is a single answer to the prompt."""


@record
class RowTokens:
    """Row to train on: a prompt [P] that the policy read first, and the response [T] after it.

    The response begins with the first trained token. Between turns it has tokens that the policy only read, such as a
    tool's output: holes of ``loss_mask``.
    """

    prompt_ids: NDArray[np.int32]
    """Token ids of the prompt, [P]. Rows of a group with the same prompt share the array."""
    ids: NDArray[np.int32]
    """Token ids of the response, [T]."""
    logprobs: NDArray[np.float32]
    """Log-prob (nats) of each response token under the distribution from which it was sampled (temperature and filters
    applied), [T]; 0 in holes."""
    versions: NDArray[np.int32]
    """Version of the weights that sampled each response token, set by the engine, [T]; -1 in holes."""
    loss_mask: NDArray[np.bool_]
    """True at the response tokens that are trained in this row, [T]: its turns' tokens."""
    turns: tuple[TurnSpan, ...]
    """Turns that are trained in this row, in order."""

    @classmethod
    def answer(cls, prompt_ids: NDArray[np.int32], tokens: SampledTokens) -> RowTokens:
        """Make the row of an episode of one turn."""
        length = len(tokens.ids)
        mask = np.ones(length, np.bool_)
        return cls(prompt_ids, tokens.ids, tokens.logprobs, tokens.versions, mask, (TurnSpan(0, 0, length),))


GroupTokens = tuple[RowTokens, ...]
"""Tokens of a group's handle: the rows of all its episodes, by k, and then in the order in which they began."""


def version_spans(versions: NDArray[np.int32]) -> list[list[int]]:
    """Return ``[[start, version], …]`` of a [T] array of versions: the start of each run of equal versions."""
    if len(versions) == 0:
        return []
    if (versions == versions[0]).all():
        return [[0, int(versions[0])]]
    # A different version is prepended, so that the first token begins a run, too
    starts = np.flatnonzero(np.diff(versions, prepend=versions[0] - 1))
    return [[int(s), int(versions[s])] for s in starts]


@record
class RowAt:
    """A row's index and lengths, without its tokens."""

    index: int
    """Index of the row in `GroupTokens`."""
    prompt_length: int
    """Number of prompt tokens, P."""
    length: int
    """Number of response tokens, T, holes included."""


class Conversation(NamedTuple):
    """One conversation of an episode, as chat messages."""

    prompt: list[dict[str, Any]]
    """Messages of the request for its first turn."""
    completion: list[dict[str, Any]]
    """All later messages up to its last answer: answers, and messages to the policy."""
    opened: str = ""
    """Tag of a thought, such as ``<think>``, with which the prompt of its last answer ends; empty for none."""


@pickled_by_fields
@dataclass(slots=True)
class Trajectory:
    """Metadata of one episode, which the driver may read. Its tokens are behind ``group.tokens``, in its ``rows``."""

    id: TrajectoryId
    replica: str
    text: str
    """Text of the episode's last answer."""
    prompt_length: int
    """Number of tokens of the first turn's context."""
    length: int
    """Number of sampled tokens of all turns, end-of-sequence included."""
    finish_reason: FinishReason
    """Reason for the end of its last answer: ``length`` only at the run's limits, not at a turn's own limit."""
    version_spans: list[list[int]]
    """Versions of its sampled tokens, with all turns concatenated. See `version_spans`."""
    started: float
    """Time on the event clock, in seconds, at which the first token was sampled."""
    finished: float
    rows: tuple[RowAt, ...]
    """Its rows, in the order in which they began. A single answer has one, a failed episode has none."""
    turns: int = 1
    reward: float | None = None
    """Reward given by its program; None if there is none."""
    conversation: Conversation | None = None
    """Last conversation of a program's episode, until it is scored; only if a reward function scores it, or it is
    shown."""
    turn_rewards: tuple[float, ...] = ()
    """Rewards of its turns by number, in addition to ``reward``; empty if its program gave none."""
    failure: str | None = None
    """Reason why the episode failed; None if it did not."""
    again: str | None = None
    """Reason why its program was last run again; None if it was not."""
    limit: str | None = None
    """Limit that ended the episode: ``turns``, ``tokens``, ``step`` or ``time``; None if no limit did."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further metrics by name: seconds in its environment, tool errors, forks."""
    steps: tuple[tuple[float, float], ...] = ()
    """Spans on the event clock in which its program worked. If there are many, neighbours are joined."""
    waits: tuple[tuple[float, float], ...] = ()
    """Spans on the event clock in which its program waited to begin."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Kind of request of its agent that the endpoint did not follow → the first reason."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Outcomes of the E episodes of one batch, and the episode of each of its S samples."""

    ids: tuple[TrajectoryId, ...]
    """Identities of the episodes, E of them."""
    rewards: NDArray[np.float32]
    """Each episode's own reward, [E]."""
    groups: NDArray[np.int64]
    """Number of each episode's group, [E]."""
    episode_of: NDArray[np.int64]
    """Index of each sample's episode, [S], ascending."""
    baselines: NDArray[np.float32] | None = None
    """Reward of the greedy answer to each episode's prompt, [E]; None if none was generated."""
    turn_rewards: tuple[tuple[float, ...], ...] = ()
    """Rewards of each episode's turns, by number, E of them; empty if no episode has any."""
    lengths: NDArray[np.int64] | None = None
    """Number of tokens that each episode trains, [E], without holes; None: they are counted from its rows."""

    def __reduce__(self) -> tuple[Callable[..., Outcomes], tuple[bytes]]:
        """Pickle all ids at once: the pickler of Ray's calls is slow for each object."""
        values = [getattr(self, each.name) for each in fields(self)]
        return _outcomes, (pickle.dumps(values, pickle.HIGHEST_PROTOCOL),)


def _outcomes(values: bytes) -> Outcomes:
    return Outcomes(*pickle.loads(values))


@pickled_by_fields
@dataclass(frozen=True, slots=True)
class Column:
    """A [T] float32 array of one row that may live elsewhere: item ``index`` of the list behind ``handle``."""

    handle: Handle[list[NDArray[np.float32]]]
    index: int


AnyColumn = Column | float
"""A column, or one number in its place: the value of every trained token of the row, 0 in holes."""


@record
class TrainSample:
    """One row of an episode on its way through a forward or training step.

    Pickled as one object of plain tuples: the pickler of Ray's calls takes microseconds for every object of a class,
    and each sample goes through it several times.
    """

    tokens: Handle[GroupTokens]
    index: int
    """Index of the row in ``tokens``."""
    prompt_length: int
    length: int
    episode: TrajectoryId
    """Episode of the row. Rows of an episode are consecutive."""
    columns: Mapping[str, AnyColumn] = field(default_factory=dict)
    """Further per-token inputs, by name: ``ref_logprobs``, ``prox_logprobs``, ``values``, ``advantages``, ``returns``.
    """
    finished: bool = True
    """False if the episode was cut off."""
    masked: bool = False
    """True if the sample is in no loss: none of its tokens counts."""

    def __reduce__(self) -> tuple[Callable[..., TrainSample], tuple[Any, ...]]:
        columns = {
            name: (column.handle, column.index) if isinstance(column, Column) else column
            for name, column in self.columns.items()
        }
        place = self.tokens, self.index, self.prompt_length, self.length
        return _sample, (*place, tuple(self.episode), columns, self.finished, self.masked)

    @property
    def total_length(self) -> int:
        """Number of tokens P + T: the sample's cost in a token-budget micro-batch."""
        return self.prompt_length + self.length


def _sample(
    tokens: Handle[GroupTokens],
    index: int,
    prompt_length: int,
    length: int,
    episode: tuple[int, int, int, int],
    columns: Mapping[str, tuple[Handle[Any], int] | float],
    finished: bool,
    masked: bool,
) -> TrainSample:
    named = {name: Column(*column) if isinstance(column, tuple) else column for name, column in columns.items()}
    return TrainSample(tokens, index, prompt_length, length, TrajectoryId(*episode), named, finished, masked)
