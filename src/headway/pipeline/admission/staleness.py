"""Staleness: limits how far generation runs ahead of training, by one inequality, and bounds the lag.

A group may be admitted only while

    admitted − discarded < ⌊(v + 1 + η) · B⌋,    v = the oldest version that a serving replica has loaded,

and never beyond the run's total. The inequality is backpressure and staleness control at once; there is no other
backpressure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import floor

from headway.config.schema import Admission
from headway.errors import StalenessExceeded


def admission_limit(version: int, eta: Fraction, groups_per_version: int) -> int:
    """Return how many groups may have been admitted while ``version`` is served: exactly ⌊(v + 1 + η) · B⌋."""
    return floor((version + 1 + eta) * groups_per_version)


def lag_bound(eta: Fraction, groups_per_version: int, window: int | None, max_lag: int | None = None) -> int | None:
    """Return a consumed group's largest lag: ⌊1 + η + (W − 2)/B⌋, 0 when ⌊η·B⌋ = 0, None (no bound) without a window.

    If ``max_lag`` is given, the bound is at most ``max_lag``.

    ``window`` is W: 1 for fifo, None for completion order. Proved in docs/staleness-proofs.md.
    """
    if floor(eta * groups_per_version) == 0:
        return 0
    if window is None:
        return max_lag
    bound = floor(1 + eta + Fraction(window - 2, groups_per_version))
    return bound if max_lag is None else min(bound, max_lag)


@dataclass(slots=True)
class Staleness:
    """Counters of the inequality that admits groups. Pure bookkeeping, independent of stages and engines.

    Example:
        >>> staleness = Staleness(Fraction(1), groups_per_version=4, window=1, total=None, loaded={"rollout-0": 0})
        >>> staleness.room, staleness.bound  # one version ahead
        (8, 1)
        >>> for _ in range(8):
        ...     staleness.admit()
        >>> staleness.room
        0
        >>> staleness.load("rollout-0", 1)
        >>> staleness.room
        4
    """

    eta: Fraction
    groups_per_version: int
    window: int | None
    total: int | None
    """Total number of groups that the run trains on; None if the data decides."""
    loaded: dict[str, int]
    """Name of each serving replica -> version that it has loaded."""
    max_lag: int | None = None
    """Largest lag of a trained group, in completion order; None if the order of consumption bounds the lag."""
    drops_overdue: bool = False
    """True if groups older than ``max_lag`` are dropped; False if a batch waits for groups that would become too
    old."""
    admitted: int = 0
    discarded: int = 0
    starts_at: int = 0
    """Version that all serving replicas must have loaded before a group is admitted: that of a resumed run's
    checkpoint."""
    eta_now: Fraction = field(init=False)
    """The η that limits admission: the configured one, or less after `lower`. The bound on lag still follows from
    ``eta``, under which earlier groups were admitted."""
    served_version: int = field(init=False)
    """Oldest version that a serving replica has loaded."""
    bound: int | None = field(init=False)
    """Largest lag at which a group may be trained on; None if there is no bound."""
    limit: int = field(init=False)
    """Number of groups that may have been admitted by now: ⌊(v + 1 + η) · B⌋, v = ``served_version``."""

    def __post_init__(self) -> None:
        self.eta_now = self.eta
        self.bound = lag_bound(self.eta, self.groups_per_version, self.window, self.max_lag)
        self._serve()

    def oldest_trainable(self, version: int) -> int | None:
        """Return the oldest version whose tokens ``version`` may be trained on; None if any. Older groups are
        dropped.
        """
        return version - self.max_lag if self.max_lag is not None and self.drops_overdue else None

    def must_go_first(self, live: Mapping[int, int], version: int, room: int) -> int | None:
        """Return the newest version that the oldest token of the next group may have; None if any group may be taken.

        Taking a younger group would make another one exceed ``max_lag``. ``live``: oldest version that any of a group's
        tokens can have -> number of live groups. ``room``: number of groups that ``version`` still trains on. A group
        is due at its oldest version + max_lag. If as many groups are due by ``version`` + k as fit until then, no other
        group may be taken. Checking k = 0 alone is not enough: with more than B groups ahead, more of them can fall due
        at once than one version trains on.
        """
        if self.max_lag is None or self.drops_overdue:
            return None
        falling_due: Counter[int] = Counter()
        for oldest, groups in live.items():
            falling_due[max(0, oldest + self.max_lag - version)] += groups
        due = 0
        for ahead in range(self.max_lag + 1):
            due += falling_due[ahead]
            # Due groups fill all room up to then: any other group would take the place of one of them.
            if due >= room + ahead * self.groups_per_version:
                return version + ahead - self.max_lag
        return None

    @property
    def serves(self) -> bool:
        """True once all replicas have loaded the version that the run began with."""
        return self.served_version >= self.starts_at

    @property
    def room(self) -> int:
        """Number of groups that the inequality and the run's total allow now."""
        if not self.serves:
            return 0
        limit = self.limit if self.total is None else min(self.limit, self.total)
        return max(0, limit - (self.admitted - self.discarded))

    def admit(self) -> None:
        self.admitted += 1

    def discard(self) -> None:
        self.discarded += 1

    def lower(self) -> bool:
        """Halve the number of groups admitted ahead; below one group it becomes 0. Returns False for no change."""
        half = self.eta_now / 2
        return self._admit_by(half if half * self.groups_per_version >= 1 else Fraction(0))

    def recover(self) -> bool:
        """Undo one `lower`. Returns False if η is not lowered."""
        # At least one group: `lower` ends at zero, and doubling zero changes nothing.
        return self._admit_by(min(self.eta, max(2 * self.eta_now, Fraction(1, self.groups_per_version))))

    def restore(self, *, version: int, admitted: int, discarded: int, eta_now: Fraction) -> None:
        """Restore the counters of a checkpoint of ``version``. η becomes at most the configured one."""
        self.starts_at, self.admitted, self.discarded = version, admitted, discarded
        self._admit_by(min(self.eta, eta_now))

    def _admit_by(self, eta: Fraction) -> bool:
        changed = eta != self.eta_now
        self.eta_now = eta
        self._serve()
        return changed

    def load(self, replica: str, version: int) -> None:
        """Note that ``replica`` serves ``version`` from now on; versions only grow."""
        if version < (before := self.loaded.get(replica, 0)):
            raise StalenessExceeded(f"replica {replica} went back from version {before} to {version}")
        self.loaded[replica] = version
        self._serve()

    def unload(self, replica: str) -> None:
        """Forget ``replica``, which no longer serves. If none is left, the oldest version served does not change."""
        del self.loaded[replica]
        self._serve()

    def _serve(self) -> None:
        # Unchanged without a replica: groups were admitted under this version, and it must never decrease.
        if self.loaded:
            self.served_version = min(self.loaded.values())
        self.limit = admission_limit(self.served_version, self.eta_now, self.groups_per_version)

    def check(self, number: int, oldest_version: int, trained_at: int) -> int:
        """Return the lag of a group that is about to be trained on. Raises `StalenessExceeded` if it is above the
        bound.
        """
        lag = trained_at - oldest_version
        if lag < 0 or (self.bound is not None and lag > self.bound):
            raise StalenessExceeded(
                f"group {number} has lag {lag} (trained at version {trained_at}, oldest token of version "
                f"{oldest_version}), outside [0, {self.bound}] for η={self.eta}, B={self.groups_per_version}, "
                f"W={self.window}, max_lag={self.max_lag}; admitted {self.admitted}, discarded {self.discarded}, "
                f"loaded {self.loaded}. "
                "This is a defect of Headway: please report it with the run's events.jsonl"
            )
        return lag


def wave_size(policy: Admission, *, room: int, unrewarded: int, validation_runs: bool, groups_per_version: int) -> int:
    """Return the number of groups to admit together now; 0 to wait.

    ``group`` admits as many groups as there is room for, at any time. ``batch`` admits one wave of at most B groups,
    once every admitted group has passed Reward and no relevant validation runs: so a whole wave starts together.
    """
    match policy:
        case Admission.GROUP:
            return room
        case Admission.BATCH:
            return 0 if unrewarded or validation_runs else min(room, groups_per_version)
