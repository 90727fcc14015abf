"""Replicas that answer the held-out problems of a validation, and hold back newer weights.

single answers            one replica, which finishes before it loads the next version
programs, η = 0           all replicas, each of which finishes before it loads the next version
programs, η > 0           all replicas, under whatever version they have: training waits for no held-out episode
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.pipeline.admission.pipeline_state import RunState
from headway.pipeline.update.replica_pool import ReplicaPool
from headway.pipeline.weight_receiver import Replica


@dataclass(frozen=True, slots=True)
class Validation:
    """One validation that is due."""

    version: int
    replica: Replica | None
    """The replica that answers; None for all replicas."""


class Validators:
    """The replicas of a run that answer its validations."""

    def __init__(self, state: RunState, fleet: ReplicaPool, *, everywhere: bool) -> None:
        """``everywhere``: all replicas answer."""
        self._state = state
        self._fleet = fleet
        self.everywhere = everywhere
        self._finishes = not everywhere or state.staleness.eta == 0
        """Whoever answers finishes before it loads a newer version."""

    async def order_when_served(self, version: int) -> Validation:
        """Make the validation of ``version`` once some replica serves."""
        await self._fleet.served()
        return self.order(version)

    def order(self, version: int) -> Validation:
        """Make the validation of ``version``, which all replicas have loaded that shall answer."""
        if self.everywhere:
            for replica in self._fleet.serving:
                self.keep(replica)
            return Validation(version, None)
        replica = self._fleet.validator
        self.keep(replica)
        return Validation(version, replica)

    def keep(self, replica: Replica) -> None:
        """Have ``replica`` load nothing newer from now on, if it has to finish a validation first."""
        if self._finishes:
            self._state.validation(replica.name, running=True)

    def let_go(self, validation: Validation) -> None:
        """Let replicas load again: nothing decodes for ``validation`` any more."""
        names = [validation.replica.name] if validation.replica is not None else list(self._state.validating)
        for name in names:
            self._state.validation(name, running=False)
