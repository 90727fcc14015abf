"""Transfer of a version from the trainer to copies of the policy: the receivers, and the reports of both sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class GatherReport:
    gather_s: float
    nbytes: int
    """Number of bytes of the complete weights, in the served dtype."""
    changed: float | None = None
    """Share of 16-bit units that differ from the previous version; None if not measured."""
    probe: NDArray[np.float32] | None = None
    """Log-probs [N] of the probe's sequences under these weights; `PolicyReceiver.probe` must match them."""

    def joined(self, others: Sequence[GatherReport]) -> GatherReport:
        """Return the report of all ranks, each of which has gathered its share."""
        reports = [self, *others]
        return replace(
            self,
            gather_s=max(report.gather_s for report in reports),  # the ranks gather at the same time
            nbytes=sum(report.nbytes for report in reports),
            changed=changed_of_all([(report.changed, report.nbytes) for report in reports]),
        )


def changed_of_all(shares: Sequence[tuple[float | None, int]]) -> float | None:
    """Return the changed share of the weights, from each part's changed share and bytes."""
    known = [(changed, nbytes) for changed, nbytes in shares if changed is not None]
    return sum(changed * nbytes for changed, nbytes in known) / sum(n for _, n in known) if known else None


@dataclass(frozen=True, slots=True)
class SendReport:
    gather_s: float
    send_s: float
    nbytes: int
    """Number of bytes sent: all weights, or fewer if only changes were sent."""
    checksum: int
    """Checksum of all weights, in order; equal to that of every receiver that ``checksums`` does not name."""
    checksums: Mapping[str, int] = field(default_factory=dict)
    """Receiver → checksum, for receivers that hold the weights in another dtype."""
    full_nbytes: int | None = None
    """Number of bytes of the complete weights, in the served dtype; None: the same as ``nbytes``."""
    changed: float | None = None
    """Share of 16-bit units that differ from the previous version, as in `GatherReport`; None after
    `training.TrainEngine.send_gathered`."""
    probe: NDArray[np.float32] | None = None
    """Log-probs [N] of the probe's sequences, as in `GatherReport`; None after
    `training.TrainEngine.send_gathered`."""


@dataclass(frozen=True, slots=True)
class ReceiveReport:
    recv_s: float
    register_s: float
    nbytes: int
    """Number of bytes received: all weights, or fewer if only changes were sent; 0 if the version was found on the
    receiver's machine."""
    checksum: int
    path: str | None = None
    """Path at which other receivers of the machine find the version (`headway.engines.weights.incoming_version`); None
    if it lies in memory that cannot be shared."""


class PolicyReceiver(Protocol):
    """Receiver with a copy of the policy: a rollout replica, or a role that recomputes log-probs.

    report, sent = await both(receiver.stage_weights(3), trainer.send_weights(3, [receiver.name]))
    assert report.checksum == sent.checksum     # version 3 is there, and version 2 is still served
    await receiver.activate(3)                  # version 3 is served
    served = await receiver.probe()             # log-probs to compare with the trainer's
    """

    name: str

    @property
    def copy(self) -> str:
        """Name of the copy in host memory from which new versions are loaded. Receivers of one copy load a version
        before the next one arrives.
        """

    async def stage_weights(self, version: int) -> ReceiveReport:
        """Receive and register ``version``: it is then complete and checksummed, but not served yet.

        The matching `training.TrainEngine.send_weights` must run at the same time. All-or-nothing: on an error nothing
        is staged and, with a second buffer, the old version is still served. Without a second buffer, partly
        overwritten weights are not served until a whole version has arrived. Raises `UpdateFailed`.
        """

    async def activate(self, version: int) -> float:
        """Load the staged ``version``: serve it from now on. Returns the seconds it took."""

    async def probe(self) -> NDArray[np.float32] | None:
        """Return the log-probs [N] of a few fixed sequences under the served weights; None if they are unknown.

        Call it only while nothing decodes.
        """
