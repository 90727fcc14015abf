"""The two ends of a transport, picked by its link. Opening an end of ``broadcast`` blocks until all have joined."""

from __future__ import annotations

from headway.interfaces import WeightReceiver, WeightSender
from headway.weights.transports.broadcast import BroadcastReceiver, BroadcastSender
from headway.weights.transports.links import Link
from headway.weights.transports.local import LocalExchange, LocalReceiver, LocalSender


def make_sender(link: Link, host: str | None = None) -> WeightSender:
    """The trainer's end. ``host`` is this machine's address for the others."""
    return LocalSender(link) if isinstance(link, LocalExchange) else BroadcastSender(link, host)


def make_receiver(link: Link, name: str, host: str | None = None) -> WeightReceiver:
    """The end of the receiver called ``name``. ``host`` is this machine's address for the others."""
    if isinstance(link, LocalExchange):
        return LocalReceiver(link, name)
    return BroadcastReceiver(link, link.receivers.index(name), host)
