"""The routing of calls: which replica a call goes to."""

from __future__ import annotations

from collections.abc import Sequence


class Routes:
    """The replicas that take calls, and how many unfinished calls each has.

    A group's calls go to its home, the replica that was least loaded when its first call came, since they share a
    prefix there; while all slots of the home are taken, they go to a replica that has one free.
    """

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._load: dict[str, int] = {}
        self._open: tuple[str, ...] = ()

    def add(self, replica: str, slots: int) -> None:
        """Know ``replica``, which takes calls once `open` names it."""
        self._slots[replica], self._load[replica] = slots, 0

    def remove(self, replica: str) -> None:
        """Forget ``replica`` and its calls."""
        self._slots.pop(replica, None)
        self._load.pop(replica, None)
        self._open = tuple(name for name in self._open if name != replica)

    def open(self, replicas: Sequence[str]) -> None:
        """Send new calls to those of ``replicas`` that are known, and to no others."""
        self._open = tuple(name for name in replicas if name in self._load)

    @property
    def any(self) -> bool:
        """Some replica takes calls."""
        return bool(self._open)

    def home(self) -> str:
        """Choose the home of a group: the least loaded replica, the first of several."""
        return min(self._open, key=self._load.__getitem__)

    def choose(self, home: str) -> str:
        """Choose the replica of one call of a group, and count the call."""
        if home not in self._open or not self._has_room(home):
            lightest = self.home()
            if home not in self._open or self._has_room(lightest):
                home = lightest
        self._load[home] += 1
        return home

    def count(self, replica: str) -> None:
        """Count a call that is bound to ``replica``."""
        self._load[replica] += 1

    def finished(self, replica: str) -> None:
        """Count a call of ``replica`` no more."""
        if replica in self._load:
            self._load[replica] -= 1

    def _has_room(self, replica: str) -> bool:
        return self._load[replica] < self._slots[replica]
