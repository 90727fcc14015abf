"""What the two ends of a transport share. Made by the driver, so nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from headway.errors import ConfigError
from headway.weights.transports.local import LocalExchange

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class BroadcastLink:
    """What every member of a broadcast group has to know to find the others. Plain data: it travels to them."""

    address: Address
    """Of the TCP store, which the sender's process hosts."""
    sender: str
    receivers: tuple[str, ...]
    timeout_s: float
    device: str = "cpu"
    """``cpu`` (Gloo) or ``cuda`` (NCCL); where buckets lie at both ends."""


Link = LocalExchange | BroadcastLink
"""The meeting point itself inside one process, an address between processes."""


def make_link(
    kind: str,
    *,
    receivers: tuple[str, ...],
    timeout_s: float,
    sender: str = "trainer",
    address: Address | None = None,
    device: str = "cpu",
) -> Link:
    """The link of transport ``kind``. ``broadcast`` needs the address of the sender's TCP store."""
    match kind:
        case "local":
            return LocalExchange(receivers, timeout_s)
        case "broadcast":
            if address is None:
                raise ConfigError("the transport 'broadcast' needs the address of the sender's store; none was given")
            return BroadcastLink(address, sender, receivers, timeout_s, device)
        case _:
            raise ConfigError(f"unknown param_update.transport {kind!r}; known are 'local' and 'broadcast'")
