"""The work of a simulated replica: groups and their trajectories, with the least that each has to remember."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headway.data.types import FinishReason, Trajectory, TrajectoryId
from headway.interfaces import FinishedGroup, GenerateRequest, Priority
from headway.simulate.lengths import LengthSampler

Outbox = asyncio.Queue[FinishedGroup | BaseException]
"""Queue from which one `generate` call takes its finished groups, or the error that ended them."""


class GroupRun:
    """One request inside the engine."""

    __slots__ = (
        "done",
        "max_tokens",
        "missing",
        "outbox",
        "prefilled_by",
        "prompt_length",
        "request",
        "runs",
        "serial",
        "training",
    )

    def __init__(self, request: GenerateRequest, outbox: Outbox, lengths: LengthSampler, serial: int) -> None:
        self.request = request
        self.outbox = outbox
        self.serial = serial
        """The serial number of the group's first trajectory."""
        self.training = request.priority is Priority.TRAINING
        self.prompt_length = len(request.prompt.token_ids)
        self.max_tokens = request.sampling.max_tokens
        self.missing = request.n
        self.prefilled_by: int | None = None
        """The version whose prefill of the prompt is kept."""
        self.done: list[Trajectory | None] = [None] * request.n
        ids = map(request.prompt.trajectory_id, range(request.first, request.first + request.n))
        self.runs = [
            TrajectoryRun(self, index, serial + index, id_, min(lengths(id_, request.number), self.max_tokens))
            for index, id_ in enumerate(ids)
        ]

    def finish(self, run: TrajectoryRun, replica: str, reason: FinishReason, now: float) -> bool:
        """Record ``run`` as it is; True if it was the last of its group, which is then delivered."""
        self.done[run.index] = Trajectory(
            run.id,
            replica,
            "",
            self.prompt_length,
            run.tokens,
            reason,
            run.spans,
            now if run.started is None else run.started,
            now,
        )
        self.missing -= 1
        if self.missing:
            return False
        self.runs = []  # they refer to the group: without this, only the garbage collector would free both
        finished = tuple(trajectory for trajectory in self.done if trajectory is not None)
        self.outbox.put_nowait(FinishedGroup(self.request.number, finished, tokens=None))
        return True

    def unfinished(self) -> list[TrajectoryRun]:
        return [run for run in self.runs if self.done[run.index] is None]


class TrajectoryRun:
    """One trajectory inside the engine. ``serial`` orders all of a replica's by submission."""

    __slots__ = (
        "cached",
        "context",
        "group",
        "id",
        "index",
        "joined",
        "length",
        "segment",
        "serial",
        "spans",
        "started",
        "tokens",
    )

    def __init__(self, group: GroupRun, index: int, serial: int, id: TrajectoryId, length: int) -> None:
        self.group = group
        self.index = index
        self.serial = serial
        self.id = id
        self.length = length
        """Tokens that the whole answer will have."""
        self.tokens = 0
        """Whole tokens when it last stopped decoding."""
        self.context = group.prompt_length or 1
        """Prompt and ``tokens``: what it has in the cache when it starts. Nothing decodes from an empty cache."""
        self.spans: list[list[int]] = []
        self.started: float | None = None
        self.cached = False
        """The trajectory's context is in the KV cache."""
        self.segment = 0
        """Number of the uninterrupted stretch in a slot that the trajectory is in; 0 while it is in none."""
        self.joined = 0.0
        """Service of the replica at which the present stretch in a slot began."""

    def gain(self, tokens: int, version: int) -> None:
        """Add ``tokens`` tokens that were sampled with the weights of ``version``."""
        if tokens:
            spans = self.spans
            if not spans or spans[-1][1] != version:
                spans.append([self.tokens, version])
            self.tokens += tokens
            self.context += tokens


def prefill_tokens(runs: Sequence[TrajectoryRun], version: int) -> int:
    """Tokens to prefill under ``version`` before ``runs`` can decode.

    A group's prompt is prefilled once per version, and kept for its answers that start later under the same version.
    """
    tokens = 0
    for run in runs:
        group = run.group
        if run.tokens:
            tokens += run.context
        elif group.prefilled_by != version:
            tokens += run.context
            group.prefilled_by = version
    return tokens
