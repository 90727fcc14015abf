"""Role of actor and rollout in one process, on a device that they share in turns; weights stay in the process.

FusedRole ──▶ actor: a training rank       its methods are called as ``actor.train_step``, …
          └─▶ rollout: a replica           … and ``rollout.engine.pause``
"""

from __future__ import annotations

from typing import Any

from headway.cluster.machine.worker_setup import Hardware
from headway.cluster.profiled_processes import ProcessProfile
from headway.cluster.roles.actor_role import ActorRole
from headway.cluster.roles.rollout_role import RolloutRole
from headway.config.transport_facts import WITHIN_PROCESS
from headway.engines.weights.protocols import TransportAddress, make_link

WITHIN = "within"
"""Key of the link between actor and replica in one process."""


class FusedRole:
    """Role of an actor and a replica: ``actor`` and ``rollout`` hold their arguments; ``common`` is for both."""

    def __init__(self, *, actor: dict[str, Any], rollout: dict[str, Any], name: str, **common: Any) -> None:
        self.actor = ActorRole(**actor, name=name, **common)
        self.rollout = RolloutRole(**rollout, **common, shares_device=True)
        self.lookout = self.actor.lookout

    @property
    def profile(self) -> ProcessProfile:
        """The profile of this process."""
        return self.actor.profile

    def hardware(self) -> Hardware:
        """Return a description of the hardware that this process computes on."""
        return self.actor.hardware()

    def connect_within(self, dtype: str, timeout_s: float) -> None:
        """Connect the replica to this process's training rank, so that it gets the weights that the rank gathers."""
        receiver = self.rollout.name
        link = make_link(WITHIN_PROCESS, TransportAddress(self.actor.layout(dtype), (receiver,), timeout_s))
        self.actor.open_link(WITHIN, link)
        self.rollout.open_link(link)

    async def close(self) -> None:
        """Close both roles, the engine first: it computes with what the rank shares with it."""
        try:
            await self.rollout.close()
        finally:
            self.actor.close()
