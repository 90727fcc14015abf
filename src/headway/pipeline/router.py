"""The router, which says which replica generates which group. A group stays on one, so that its prompt is prefilled
once, or is split.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from heapq import heappop, heappush

from headway.interfaces import FinishedGroup, GenerateRequest


class Router:
    """Least loaded, by trajectories in flight; ties go to the replica that comes first.

    Loads lie in a heap, so that a group costs no look at every replica. It may hold entries that are out of date; they
    are left out when they come up.
    """

    def __init__(self, *, split_groups: bool = False) -> None:
        self._split_groups = split_groups
        self._in_flight: dict[str, dict[int, int]] = {}
        """Replica → group → its trajectories there."""
        self._homes: dict[int, str] = {}
        """Group → its replica, where groups are not split: a second request of it, as for its baseline, goes there."""
        self._load: dict[str, int] = {}
        self._places: dict[str, int] = {}
        self._heap: list[tuple[int, int, str]] = []
        """(load, place, replica)"""

    def add(self, replica: str) -> None:
        """``replica`` takes requests from now on."""
        self._places[replica] = len(self._places)
        self._in_flight[replica] = {}
        self._change(replica, 0)

    def assign(
        self, requests: Sequence[GenerateRequest], replicas: Collection[str]
    ) -> list[tuple[str, list[GenerateRequest]]]:
        """Split a wave: for each of ``replicas`` that gets something, its name and its requests, in order."""
        shares: dict[str, list[GenerateRequest]] = {}
        for request in requests:
            used: set[str] = set()
            for part in self._parts(request, len(replicas)):
                home = self._homes.get(part.number)
                lightest = home if home is not None and home in replicas else self._lightest(replicas, used)
                if not self._split_groups:
                    self._homes[part.number] = lightest
                used.add(lightest)
                shares.setdefault(lightest, []).append(part)
                flying = self._in_flight[lightest]
                flying[part.number] = flying.get(part.number, 0) + part.n
                self._change(lightest, part.n)
        return sorted(shares.items(), key=lambda share: self._places[share[0]])

    def finished(self, replica: str, group: FinishedGroup) -> None:
        """Note that some or all of a group's trajectories on ``replica`` are finished."""
        flying = self._in_flight.get(replica, {})
        if group.number not in flying:
            return  # the replica was forgotten
        self._change(replica, -len(group.trajectories))
        flying[group.number] -= len(group.trajectories)
        if flying[group.number] == 0:
            del flying[group.number]
            self._homes.pop(group.number, None)

    def forget(self, replica: str) -> list[int]:
        """The replica is gone. Returns the groups that it had not finished, oldest first."""
        self._load.pop(replica, None)
        left = sorted(self._in_flight.pop(replica, {}))
        for number in left:
            self._homes.pop(number, None)
        return left

    def _change(self, replica: str, trajectories: int) -> None:
        self._load[replica] = load = self._load.get(replica, 0) + trajectories
        heappush(self._heap, (load, self._places[replica], replica))
        if len(self._heap) > 8 * len(self._places) + 8:
            self._heap = sorted((load, self._places[name], name) for name, load in self._load.items())

    def _lightest(self, replicas: Collection[str], used: Collection[str]) -> str:
        """The least loaded of ``replicas``, without ``used``, which have a part of the group already."""
        aside = []
        while True:
            load, _, name = self._heap[0]
            if self._load.get(name) == load:
                if name in replicas and name not in used:
                    break
                aside.append(self._heap[0])
            heappop(self._heap)
        for entry in aside:
            heappush(self._heap, entry)
        return name

    def _parts(self, request: GenerateRequest, replicas: int) -> list[GenerateRequest]:
        """The request as it is or, split, in parts as equal as can be, the larger ones first."""
        count = min(request.n, replicas) if self._split_groups else 1
        if count == 1:
            return [request]
        size, larger = divmod(request.n, count)
        parts, first = [], request.first
        for index in range(count):
            n = size + (index < larger)
            parts.append(replace(request, n=n, first=first))
            first += n
        return parts
