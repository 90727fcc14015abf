"""Driver's part of a checkpoint: what the pipeline knows at a version boundary, taken there and put back.

    boundary of version k ──take()──▶ JSON ──saved with the trainer's state, in one rename──▶ restore() ──▶ version k
                                                  └──▶ the groups that were open: dropped(resume), their prompts again

A boundary is the instant at which version k−1 is consumed and nothing of version k has begun: the update to k comes
after it. So a resumed run begins with that update, and admits nothing before it. Every part that has a state is listed
here; whatever is not here is either configuration, or made anew at every start (docs/resume.md lists it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from headway.data.interfaces.episode_groups import PromptSource
from headway.data.types import Prompt
from headway.errors import DataError
from headway.pipeline.admission.fetches import Fetches
from headway.pipeline.admission.ledger import Fate, Ledger
from headway.pipeline.admission.pipeline_state import RunState
from headway.pipeline.critic_turns import Critic
from headway.pipeline.observing.off_policy_guard import Guard

Taken = Mapping[str, Any]
"""State of the driver as JSON values."""


def balance(taken: Taken) -> dict[str, int]:
    """Return the ledger's counts in the checkpoint ``taken``, as in the `VersionReached` event of that boundary."""
    ledger = Ledger()
    ledger.restore(taken["ledger"], {})
    return ledger.counts() | {Fate.IN_FLIGHT.value: len(taken["ledger"]["open"])}


@dataclass(frozen=True, slots=True)
class DriverState:
    """Parts of the pipeline with a state that a resumed run cannot know by itself."""

    run: RunState
    source: PromptSource
    fetches: Fetches
    guard: Guard
    lowers_eta: bool
    """True where the guard may reduce the η that limits admission."""
    critic: Critic | None

    def take(self, trainer: Mapping[str, Any]) -> Taken:
        """Take the state at a boundary, before anything is awaited; ``trainer``: `ActorTrain.counters` there.

        The critic may still be training: see `with_critic`.
        """
        return {
            **self.run.state(),
            "source": self.source.state(),
            "fetches": self.fetches.taken,
            "trainer": trainer,
            "guard": self.guard.state(),
        }

    def with_critic(self, taken: Taken) -> Taken:
        """Add the critic's state to ``taken``, once the critic was trained on all that the trainer was, and saved."""
        return taken if self.critic is None else {**taken, "critic": self.critic.state()}

    def restore(self, taken: Taken) -> None:
        """Restore the state ``taken``, before anything runs. Emits the fates of the groups that were open.

        Raises `DataError` when the data are not those of the checkpoint.
        """
        self.source.restore(taken["source"])
        again = [self._found(*one) for one in taken["again"]]
        lost = [self._found(*one) for _, *one in taken["ledger"]["open"]]
        eta_now = Fraction(taken["eta_now"]) if self.lowers_eta else self.run.staleness.eta
        self.run.restore(taken, again=again, open_prompts=lost, eta_now=eta_now)
        self.fetches.restore(taken["fetches"])
        self.guard.restore(taken["guard"])
        if self.critic is not None:
            self.critic.restore(taken["critic"], taken["fetches"])

    def _found(self, epoch: int, row: int, attempt: int) -> Prompt:
        """The prompt of an unfinished group; where changed data do not have it any more, the next one in its place."""
        prompt = self.source.find(epoch, row)
        if prompt is not None:
            return replace(prompt, attempt=attempt)
        if (following := self.source.next()) is None:
            raise DataError(
                f"the checkpoint waits for row {row} of epoch {epoch}, which the data do not have, and they have no "
                "further one in its place. Resume with the same data"
            )
        return following
