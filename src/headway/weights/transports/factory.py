"""Pick a transport by its name (``param_update.transport``)."""

from __future__ import annotations

from headway.errors import ConfigError
from headway.interfaces import WeightReceiver, WeightSender
from headway.weights.transports.broadcast import BroadcastLink, BroadcastReceiver, BroadcastSender
from headway.weights.transports.local import LocalExchange, LocalReceiver, LocalSender

Link = LocalExchange | BroadcastLink
"""What sender and receivers share: the object itself inside one process, an address between processes."""


def make_link(
    kind: str,
    *,
    receivers: tuple[str, ...],
    timeout_s: float,
    sender: str = "trainer",
    address: tuple[str, int] | None = None,
    device: str = "cpu",
) -> Link:
    """The link of transport ``kind``; ``address`` is the sender's TCP store, which ``broadcast`` needs."""
    match kind:
        case "local":
            return LocalExchange(receivers, timeout_s)
        case "broadcast":
            if address is None:
                raise ConfigError("the transport 'broadcast' needs the address of the sender's store")
            return BroadcastLink(address, sender, receivers, timeout_s, device)
        case _:
            raise ConfigError(f"unknown param_update.transport {kind!r}; known are 'local' and 'broadcast'")


def make_sender(link: Link, host: str | None = None) -> WeightSender:
    """The trainer's end. For ``broadcast`` this blocks until every receiver has joined."""
    return LocalSender(link) if isinstance(link, LocalExchange) else BroadcastSender(link, host)


def make_receiver(link: Link, name: str, host: str | None = None) -> WeightReceiver:
    """The end of the receiver called ``name``. For ``broadcast`` this blocks until all others have joined."""
    if isinstance(link, LocalExchange):
        return LocalReceiver(link, name)
    return BroadcastReceiver(link, link.receivers.index(name), host)
