"""Links, by which the two ends of a transport find each other.

    driver: make_link(name, Meeting) ─▶ link ─▶ trainer: open_sender(link)      receivers: open_receiver(link, name)

A transport is a module here with these three functions, imported when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from headway.config.schema import Config
from headway.config.transport_facts import TRANSPORTS, transport_of
from headway.devices import kind_of
from headway.engines.weights.protocols import WeightReceiver, WeightSender
from headway.engines.weights.weight_layout import Manifest
from headway.errors import ConfigError, UpdateFailed

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class TransportAddress:
    """The ends that meet for a transfer, and what there is to meet with. A transport takes what it needs."""

    manifest: Manifest
    receivers: tuple[str, ...]
    timeout_s: float
    """Seconds for any wait of one end for another."""
    sender: str = "trainer"
    address: Address | None = None
    """The address of a TCP store, which the sender's process hosts."""
    generation: int = 0
    """Number of this meeting in its run: a transport that failed, or whose members changed, meets anew."""
    device: str = "cpu"
    """Device on which buckets lie at both ends, ``cpu`` or ``cuda``, for a transport that can carry either."""
    directory: Path | None = None
    """A directory for files that the receivers can open, too."""


@dataclass(frozen=True, slots=True)
class Link:
    """The facts that both ends of a transport need to open. Travels to other processes, except for ``local``'s."""

    transport: str
    data: Any
    """The transport's own link, as its module made it."""


@dataclass(frozen=True, slots=True)
class EndContext:
    """The means that one end of a transport has on the machine where it runs."""

    host: str | None = None
    """Address at which the other ends reach this machine."""
    put: Callable[[Any], Any] = lambda value: value
    """Function that keeps an object where other processes can get it, and returns a handle of it."""
    fetch: Callable[[Sequence[Any]], list[Any]] = list
    """Function that gets the objects behind handles. Raises an error of any type when one does not come in time."""


def make_link(transport: str, meeting: TransportAddress) -> Link:
    """Make the link of ``transport``. Raises `ConfigError` if it is unknown, or if ``meeting`` lacks what it needs."""
    return Link(transport, _module(transport).make_link(meeting))


def open_sender(link: Link, here: EndContext) -> WeightSender:
    """Open the trainer's end of ``link``. With ``broadcast`` this blocks until all receivers have opened theirs."""
    sender: WeightSender = _module(link.transport).open_sender(link.data, here)
    return sender


def open_receiver(link: Link, name: str, here: EndContext) -> WeightReceiver:
    """Open the end of the receiver called ``name``. With ``broadcast`` this blocks until all ends are open."""
    receiver: WeightReceiver = _module(link.transport).open_receiver(link.data, name, here)
    return receiver


def through_devices(config: Config, device: str) -> bool:
    """Tell whether buckets go from device to device, where training and generation have ``device`` s of their own."""
    update, kind = config.param_update, kind_of(device)
    transport = transport_of(update.transport, backend=config.cluster.backend, shared=False)
    takes_turns = update.schedule == "synchronous"  # else collectives would compete with training
    return kind.collectives != "gloo" and takes_turns and TRANSPORTS[transport].on_gpu


def needs(transport: str, what: str) -> ConfigError:
    """The error for a meeting that lacks what a transport needs."""
    return ConfigError(f"the transport {transport!r} needs {what}; none was given")


def place_of(name: str, receivers: Sequence[str]) -> int:
    """The place of ``name`` among a link's receivers. Raises `UpdateFailed` for one that the link is not for."""
    if name not in receivers:
        raise UpdateFailed(
            f"{name} is not among those that this link reaches: {', '.join(receivers)}; it has to meet anew"
        )
    return tuple(receivers).index(name)


def _module(transport: str) -> ModuleType:
    if transport not in TRANSPORTS:
        raise ConfigError(f"unknown param_update.transport {transport!r}; known are {', '.join(TRANSPORTS)}")
    return import_module(f"headway.engines.weights.transports.{transport}")
