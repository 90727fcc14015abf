"""The units of work: a request's group, and each of its trajectories while it is being written.

GroupRun ──▶ n × TrajectoryRun:  waiting ─▶ decoding ─▶ finished
                                    ▲          │
                                    └──────────┘  parked, by an interrupt or for want of memory: tokens kept, KV dropped
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from headway.data.types import FinishReason, GroupTokens, ResponseTokens, Trajectory, version_spans
from headway.engines.rollout.randomness import trajectory_key
from headway.errors import DataError, NonFinite
from headway.interfaces import FinishedGroup, GenerateRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class Written:
    """The tokens of a trajectory so far, with what belongs to each; all [T]."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]

    @classmethod
    def nothing(cls) -> Written:
        return cls(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A context after prefill: enough to start any number of trajectories from it."""

    kv: torch.Tensor
    """[layers, 2·kv_heads, T, head_dim]"""
    logits: torch.Tensor
    """[V], of the token that follows."""


@dataclass(slots=True, eq=False)
class TrajectoryRun:
    """State of one trajectory in the engine, from submission to its end."""

    group: GroupRun
    k: int
    serial: int
    """Place in the order of submission."""
    key: int
    """The key of the trajectory's uniform numbers."""
    limit: int
    """Most tokens that it may have: ``max_tokens``, or what the context leaves."""
    written: Written = field(default_factory=Written.nothing)
    """Up to date only while it is not decoding."""
    started: float | None = None
    """The time at which its first token was sampled."""

    @property
    def fresh(self) -> bool:
        """True before the first token is sampled: the trajectory starts from its group's prompt."""
        return len(self.written.ids) == 0

    @property
    def length(self) -> int:
        """The length of its `context`, in tokens."""
        return len(self.group.prompt_ids) + len(self.written.ids)

    @property
    def context(self) -> NDArray[np.int64]:
        """[P + T] what has to be prefilled before its next token."""
        return np.concatenate([self.group.prompt_ids, self.written.ids.astype(np.int64)])


@dataclass(slots=True, eq=False)
class GroupRun:
    """One request from submission to its `FinishedGroup`."""

    request: GenerateRequest
    owner: Hashable
    """The call that submitted the group; results and cancellation go by it."""
    prompt_ids: NDArray[np.int64]
    """[P]"""
    runs: list[TrajectoryRun] = field(default_factory=list)
    unplaced: int = 0
    """Fresh trajectories that still need the prompt's prefill."""
    prefilled: Prefilled | None = None
    """The prompt's, kept while some of the group's trajectories have yet to start."""
    oldest_version: int | None = None
    """The version that sampled the group's first token, whichever trajectory's that was."""
    _done: dict[int, tuple[Trajectory, ResponseTokens]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        request: GenerateRequest,
        owner: Hashable,
        *,
        seed: int,
        serial: int,
        max_context: int,
        vocabulary: int,
    ) -> GroupRun:
        """Check a request and set up its trajectories, numbered from ``serial``.

        Raises `DataError` for a prompt that is empty, leaves no room for an answer or has tokens that the model does
        not know, and for sampling parameters that make no sense.
        """
        check_sampling(request.sampling, vocabulary)
        prompt = np.asarray(request.prompt.token_ids, np.int64)
        room = max_context - len(prompt)
        if len(prompt) == 0 or room < 1 or request.n < 1:
            raise DataError(
                f"row {request.prompt.row} asks for {request.n} answers to a prompt of {len(prompt)} tokens; "
                f"the engine needs one answer at least, a prompt, and room for a token in its context of {max_context} "
                "(shorten the prompt, or raise data.max_prompt_length or data.max_response_length)"
            )
        if prompt.min() < 0 or prompt.max() >= vocabulary:
            raise DataError(
                f"the prompt of row {request.prompt.row} has token ids from {prompt.min()} to {prompt.max()}, but the "
                f"model knows 0 to {vocabulary - 1}; do tokenizer and model belong together?"
            )
        group = cls(request, owner, prompt, unplaced=request.n)
        seed = seed if request.sampling.seed is None else request.sampling.seed
        for position, k in enumerate(group.ks):
            key = trajectory_key(seed, request.prompt.trajectory_id(k))
            group.runs.append(TrajectoryRun(group, k, serial + position, key, min(request.sampling.max_tokens, room)))
        return group

    @property
    def ks(self) -> range:
        """Indices k of the group's trajectories in this request."""
        return range(self.request.first, self.request.first + self.request.n)

    def place(self, count: int, prefilled: Prefilled) -> None:
        """``count`` fresh trajectories have started from ``prefilled``; keep it if there are more to come."""
        self.unplaced -= count
        if self.unplaced == 0:
            self.prefilled = None
        elif self.prefilled is None:
            # A copy: the original is a view of a whole prefill batch.
            self.prefilled = Prefilled(prefilled.kv.clone(), prefilled.logits.clone())

    def finish(
        self,
        run: TrajectoryRun,
        reason: FinishReason,
        *,
        replica: str,
        text: Callable[[Sequence[int]], str],
        finished: float,
    ) -> FinishedGroup | None:
        """Record the end of one trajectory, whose ``written`` is up to date; the group, once it was the last."""
        written = run.written
        trajectory = Trajectory(
            id=self.request.prompt.trajectory_id(run.k),
            replica=replica,
            text=text(written.ids.tolist()),
            prompt_length=len(self.prompt_ids),
            length=len(written.ids),
            finish_reason=reason,
            version_spans=version_spans(written.versions),
            started=finished if run.started is None else run.started,
            finished=finished,
        )
        mask = np.ones(len(written.ids), np.bool_)
        self._done[run.k] = (trajectory, ResponseTokens(written.ids, written.logprobs, written.versions, mask))
        if len(self._done) < self.request.n:
            return None
        trajectories, responses = zip(*(self._done[k] for k in self.ks), strict=True)
        return FinishedGroup(
            number=self.request.number,
            trajectories=trajectories,
            tokens=GroupTokens(self.prompt_ids.astype(np.int32), responses),
        )


def check_sampling(params: SamplingParams, vocabulary: int) -> None:
    """Raise `DataError` if ``params`` cannot be sampled from by a model of so many tokens."""
    if params.max_tokens < 1:
        raise DataError(f"sampling needs max_tokens ≥ 1, got {params.max_tokens}")
    if not 0 <= params.min_tokens <= params.max_tokens:
        raise DataError(f"sampling needs 0 ≤ min_tokens ≤ max_tokens={params.max_tokens}, got {params.min_tokens}")
    if params.temperature < 0 or not 0 < params.top_p <= 1 or params.top_k < 0 or not 0 <= params.min_p <= 1:
        raise DataError(
            "sampling needs temperature ≥ 0, 0 < top_p ≤ 1, top_k ≥ 0 and 0 ≤ min_p ≤ 1, got "
            f"temperature {params.temperature}, top_p {params.top_p}, top_k {params.top_k}, min_p {params.min_p}"
        )
    if not 0 < params.repetition_penalty < math.inf:
        raise DataError(f"sampling needs a repetition_penalty above 0, got {params.repetition_penalty}")
    if unknown := [token for token, _ in params.logit_bias if not 0 <= token < vocabulary]:
        raise DataError(f"logit_bias names token {unknown[0]}, but the model knows 0 to {vocabulary - 1}")
    if not all(math.isfinite(bias) for _, bias in params.logit_bias):
        raise DataError("logit_bias must be finite; to forbid a token, give it -1e4")
    if any(not text for text in params.stop):
        raise DataError("an empty stop string ends every answer before it begins; drop it")


def not_finite(name: str, version: int) -> NonFinite:
    """The error for logits that are not finite, which give no distribution to sample from."""
    why = (
        "the weights have diverged (lower actor.optim.lr, or look at the gradient norm)"
        if version
        else "look at the weights that it started from, and at rollout.dtype"
    )
    return NonFinite(f"rollout engine {name}: the model's logits are not finite under version {version}; {why}")
