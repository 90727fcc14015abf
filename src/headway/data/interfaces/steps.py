"""One optimizer step: where in the run it is, and what it reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headway.data.assignment import GroupId
from headway.data.types import TrajectoryId


@dataclass(frozen=True, slots=True)
class StepContext:
    """Position of an optimizer step in the run."""

    version: int = 0
    """Version of the trainer. Optimizer steps that it made since then are not a version yet."""
    progress: float = 0.0
    """Share of this version's optimizer steps that were made before this one: in [0, 1)."""
    clip_scale: float = 1.0
    """Width of the trust region, as a multiple of the configured one."""
    shown: frozenset[GroupId] = frozenset()
    """Groups of the mini-batch whose rows the report has, as the step saw them."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainedRow:
    """One row as an optimizer step saw it. All arrays are [T], of its response tokens.

    What a step costs does not depend on it: the log-probs are those of the step's own forward pass.
    """

    episode: TrajectoryId
    prompt_ids: NDArray[np.int32]
    """Token ids of the row's prompt, [P]."""
    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    """True where the loss counts the token."""
    versions: NDArray[np.int32]
    """Version that sampled each token; -1 where none did."""
    behaviour: NDArray[np.float32]
    """Log-probs (nats) under the policy that sampled the tokens, as the engine gave them."""
    logprobs: NDArray[np.float32]
    """Log-probs (nats) under the trainer's policy, before the step."""
    entropy: NDArray[np.float32]
    """Entropies (nats) of the trainer's policy at each token."""
    columns: Mapping[str, NDArray[np.float32]]
    """Columns that came with the row, by name."""
    cut: int = 0
    """Number of tokens that were left out in the middle of a long response; T counts those that are here."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """Report on one optimizer step. ``skipped`` when loss or gradient norm was not finite: weights are unchanged."""

    skipped: bool
    metrics: dict[str, float]
    shown: tuple[TrainedRow, ...] = ()
    """Rows of the groups that `StepContext.shown` names, those of an episode in order."""

    def joined(self, others: Sequence[StepReport]) -> StepReport:
        """Merge the reports of all ranks: their metrics agree, their rows differ."""
        return replace(self, shown=tuple(row for report in (self, *others) for row in report.shown))


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Negative log-likelihood of some tokens."""

    nats: float
    """Sum over the tokens."""
    tokens: int

    def joined(self, others: Sequence[TokenLoss]) -> TokenLoss:
        """Return the loss of the tokens of all ranks."""
        everything = (self, *others)
        return TokenLoss(sum(one.nats for one in everything), sum(one.tokens for one in everything))
