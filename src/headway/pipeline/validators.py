"""Who answers the held-out problems of a validation, how many at a time, and who loads nothing newer meanwhile.

single answers            one replica, which finishes before it loads the next version
programs, η = 0           all replicas, each of which finishes before it loads the next version
programs, η > 0           all replicas, under whatever version they have: training waits for no held-out episode

Held-out answers start before training's. At η > 0 they are therefore asked for a few at a time, in proportion to what
is generated for training in a version: both end together, and training gets its first groups while they last.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction
from math import floor

from headway.pipeline.fleet import Fleet
from headway.pipeline.receiver import Replica
from headway.pipeline.state import RunState


@dataclass(frozen=True, slots=True)
class Validation:
    """One validation that is due."""

    version: int
    replica: Replica | None
    """The replica that answers; None for all replicas."""
    pace: int | None
    """Number of problems that are asked at a time while training generates, too; None for all at once."""


class Validators:
    """The replicas of a run that answer its validations."""

    def __init__(self, state: RunState, fleet: Fleet, *, everywhere: bool, problems: int, n: int, trained: int) -> None:
        """
        Args:
            everywhere: all replicas answer.
            problems: held-out problems of a validation.
            n: answers to each of them.
            trained: answers that are trained on in a version.
        """
        self._state = state
        self._fleet = fleet
        self.everywhere = everywhere
        self._finishes = not everywhere or state.staleness.eta == 0
        """Whoever answers finishes before it loads a newer version."""
        self._of_a_slot = Fraction(problems, problems * n + trained)
        """Problems that are asked at a time, for each slot of those who answer."""

    def order(self, version: int, *, alone: bool = False) -> Validation:
        """Make the validation of ``version``, which all replicas have loaded that shall answer.

        ``alone``: nothing is generated beside it that is trained on.
        """
        alone = alone or self._state.staleness.eta == 0
        if self.everywhere:
            for replica in self._fleet.serving:
                self.keep(replica)
            return Validation(version, None, None if alone else self._pace(self._fleet.serving))
        replica = self._fleet.validator
        self.keep(replica)
        return Validation(version, replica, None if alone else self._pace([replica]))

    def _pace(self, replicas: Collection[Replica]) -> int:
        return max(1, floor(self._of_a_slot * sum(replica.slots for replica in replicas)))

    def keep(self, replica: Replica) -> None:
        """Have ``replica`` load nothing newer from now on, if it has to finish a validation first."""
        if self._finishes:
            self._state.validation(replica.name, running=True)

    def let_go(self, validation: Validation) -> None:
        """Let replicas load again: nothing decodes for ``validation`` any more."""
        names = [validation.replica.name] if validation.replica is not None else list(self._state.validating)
        for name in names:
            self._state.validation(name, running=False)
