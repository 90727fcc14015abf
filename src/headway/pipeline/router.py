"""Which replica generates which group. A group stays on one replica, so that its prompt is prefilled once."""

from __future__ import annotations

from collections.abc import Sequence

from headway.interfaces import GenerateRequest, RolloutEngine


class Router:
    """Least loaded, by trajectories in flight; ties go to the replica that comes first."""

    def __init__(self, replicas: Sequence[RolloutEngine]) -> None:
        self.replicas = replicas
        self._in_flight = [0] * len(replicas)

    def assign(self, requests: Sequence[GenerateRequest]) -> list[tuple[int, list[GenerateRequest]]]:
        """Split a wave: for each replica that gets something, its index and its requests, in order."""
        shares: list[list[GenerateRequest]] = [[] for _ in self.replicas]
        for request in requests:
            lightest = min(range(len(self.replicas)), key=lambda index: self._in_flight[index])
            shares[lightest].append(request)
            self._in_flight[lightest] += request.n
        return [(index, share) for index, share in enumerate(shares) if share]

    def finished(self, index: int, trajectories: int) -> None:
        self._in_flight[index] -= trajectories
