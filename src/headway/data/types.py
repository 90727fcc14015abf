"""The nouns of the pipeline: prompt, trajectory, row, training sample. Plain data; numpy, never torch.

The group is in `headway.data.interfaces.episode_groups`.

Token arrays stay behind a `Handle` once a group left its engine: the driver reads metadata only and passes handles on,
so a group's tokens travel from the process that sampled them to the process that trains on them, and nowhere else. A
handle is whatever the cluster backend makes of it: the object itself (inline), a file in memory (tokens on Ray) or a
Ray object reference (columns).

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
    """A trajectory's identity: the ``attempt``-th run of ``row`` in ``epoch``, episode ``k``. Keys its randomness."""

    epoch: int
    row: int
    attempt: int
    k: int


@pickled_by_fields
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
    asked: str | None = None
    """The row's text, where it is not ``text``: the chat template made a message of it."""

    @property
    def data_text(self) -> str | None:
        """The row's text, without the chat template; None if the row gives messages."""
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
        """Identity of the prompt's group: epoch, row and attempt, with which the ids of its trajectories begin."""
        return self.epoch, self.row, self.attempt

    def trajectory_id(self, k: int) -> TrajectoryId:
        return TrajectoryId(self.epoch, self.row, self.attempt, k)


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@record
class SampledTokens:
    """The tokens that one call of the policy has sampled. All arrays are [T].

    They are pickled as one string of bytes: an array of its own costs more to pickle than all tokens of an answer.
    """

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    """Log-prob (nats) under the very distribution the token was sampled from (temperature and filters applied)."""
    versions: NDArray[np.int32]
    """Version of the weights that sampled the token, stamped by the engine."""

    @classmethod
    def nothing(cls) -> SampledTokens:
        """Make an empty one: nothing sampled yet."""
        return cls(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))

    def __reduce__(self) -> tuple[Callable[..., SampledTokens], tuple[bytearray]]:
        # The dtypes are those that `_sampled_tokens` reads: 4 bytes each, whatever an engine has sampled into
        parts = (self.ids, np.int32), (self.logprobs, np.float32), (self.versions, np.int32)
        return _sampled_tokens, (bytearray().join([array.astype(kind, copy=False).tobytes() for array, kind in parts]),)


def _sampled_tokens(data: bytearray) -> SampledTokens:
    # Over a bytearray: arrays over bytes could not be written to.
    length = len(data) // 12
    return SampledTokens(
        np.frombuffer(data, np.int32, length),
        np.frombuffer(data, np.float32, length, 4 * length),
        np.frombuffer(data, np.int32, length, 8 * length),
    )


class TurnSpan(NamedTuple):
    """The place of one turn's sampled tokens in a row's arrays, those of its response unless said otherwise: ``[start,
    stop)``."""

    number: int
    """The turn's number in its episode, from 0."""
    start: int
    stop: int
    state: int = 0
    """The state that the turn was taken in, as 64 bits with a sign: equal where the policy was told the same last, or
    where programs name the same one. 0 where an answer to the prompt is all of its episode."""


@record
class RowTokens:
    """A row to train on: a prompt [P] that the policy read first, and the response [T] behind it.

    The response begins with the first token that is trained. Between turns it has what the policy only read, such as a
    tool's output: holes of ``loss_mask``.
    """

    prompt_ids: NDArray[np.int32]
    """Token ids of the prompt, [P]. Rows of a group with the same prompt share the array."""
    ids: NDArray[np.int32]
    """Token ids of the response, [T]."""
    logprobs: NDArray[np.float32]
    """Log-prob (nats) of each response token under the very distribution that it was sampled from (temperature and
    filters applied), [T]; 0 in holes."""
    versions: NDArray[np.int32]
    """Version of the weights that sampled each response token, stamped by the engine, [T]; -1 in holes."""
    loss_mask: NDArray[np.bool_]
    """True at the response tokens that are trained in this row, [T]: those of its turns."""
    turns: tuple[TurnSpan, ...]
    """The turns that are trained in this row, in order."""

    @classmethod
    def answer(cls, prompt_ids: NDArray[np.int32], tokens: SampledTokens) -> RowTokens:
        """Make the row of an episode of one turn."""
        length = len(tokens.ids)
        mask = np.ones(length, np.bool_)
        return cls(prompt_ids, tokens.ids, tokens.logprobs, tokens.versions, mask, (TurnSpan(0, 0, length),))


GroupTokens = tuple[RowTokens, ...]
"""The tokens behind a group's handle: the rows of all its episodes, in order of k, then as they began."""


def version_spans(versions: NDArray[np.int32]) -> list[list[int]]:
    """``[[start, version], …]`` of a [T] array of versions: where each run of equal versions starts."""
    if len(versions) == 0:
        return []
    if (versions == versions[0]).all():
        return [[0, int(versions[0])]]
    # Prepended is a version that the first one differs from, so that it begins a run, too
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
    """The messages that its first turn was asked with."""
    completion: list[dict[str, Any]]
    """All messages behind them up to its last answer: answers, and what they were told."""
    opened: str = ""
    """The tag of a thought, such as ``<think>``, with which the prompt of its last answer ends; empty for none."""


@pickled_by_fields
@dataclass(slots=True)
class Trajectory:
    """Metadata of one episode: what the driver may look at. Its tokens are behind ``group.tokens``, in its ``rows``."""

    id: TrajectoryId
    replica: str
    text: str
    """Text of its last answer."""
    prompt_length: int
    """Number of tokens of its first turn's context."""
    length: int
    """Number of sampled tokens of all turns, end-of-sequence included."""
    finish_reason: FinishReason
    """How its last answer ended: ``length`` only at the run's limits, not at one of a turn's own."""
    version_spans: list[list[int]]
    """Versions of its sampled tokens, all turns one after the other. See `version_spans`."""
    started: float
    """Time on the event clock, in seconds, at which the first token was sampled."""
    finished: float
    rows: tuple[RowAt, ...]
    """Its rows, as they began. A single answer has one, an episode that failed has none."""
    turns: int = 1
    reward: float | None = None
    """Reward given by its program; None if it gave none."""
    conversation: Conversation | None = None
    """Its last conversation; only of a program's episode that a reward function scores, or that is shown, until it is
    scored."""
    turn_rewards: tuple[float, ...] = ()
    """Rewards of its turns, by number, where its program gave any; beside ``reward``."""
    failure: str | None = None
    """Why the episode failed; None if it did not."""
    again: str | None = None
    """Why its program was run again, the last time; None if it was not."""
    limit: str | None = None
    """The limit that ended it: ``turns``, ``tokens``, ``step`` or ``time``; None if none did."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers to be reported, by name: seconds in its environment, tool errors, forks."""
    steps: tuple[tuple[float, float], ...] = ()
    """Spans on the event clock in which its program worked. Of many, neighbours are joined."""
    waits: tuple[tuple[float, float], ...] = ()
    """Spans on the event clock in which its program waited to begin."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """What its agent asked the endpoint for and did not get: the first reason of each kind."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The outcomes of the E episodes of one batch, and which of its S samples are whose."""

    ids: tuple[TrajectoryId, ...]
    """Identities of the episodes, E of them."""
    rewards: NDArray[np.float32]
    """Each episode's own reward, [E]."""
    groups: NDArray[np.int64]
    """Number of each episode's group, [E]."""
    episode_of: NDArray[np.int64]
    """Index of each sample's episode, [S], ascending."""
    baselines: NDArray[np.float32] | None = None
    """Reward of the greedy answer to each episode's prompt, [E], where one was generated."""
    turn_rewards: tuple[tuple[float, ...], ...] = ()
    """Rewards of each episode's turns, by number, E of them; empty if no episode has any."""
    lengths: NDArray[np.int64] | None = None
    """Number of tokens that each episode trains, [E], without holes; None: to be counted in its rows."""

    def __reduce__(self) -> tuple[Callable[..., Outcomes], tuple[bytes]]:
        """Pickle all ids at once: the pickler that calls on Ray go through is slow for each."""
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
"""A column, or one number, which travels in its place: that of every token that the row trains, 0 in holes."""


@record
class TrainSample:
    """One row of an episode on its way through a forward or training step.

    It is pickled as one object with plain tuples in it: the pickler that calls on Ray go through takes microseconds of
    Python for every object of a class, and each sample goes through it several times.
    """

    tokens: Handle[GroupTokens]
    index: int
    """Index of the row among those behind ``tokens``."""
    prompt_length: int
    length: int
    episode: TrajectoryId
    """The episode that the row is of. Its rows lie next to each other."""
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
        """Number of tokens P + T, which is what the sample costs in a token-budget micro-batch."""
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
