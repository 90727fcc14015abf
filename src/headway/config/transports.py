"""What each transport of weights can do.

One line here and one file, ``weights/transports/<name>.py``, make a transport.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class TransportFacts:
    backends: tuple[str, ...]
    """Values of ``cluster.backend`` that it works with, on devices of their own."""
    streamed: bool
    """Both ends run at the same time. Otherwise the sender leaves everything where receivers find it."""
    carries_delta: bool
    """Whether ``param_update.encoding: delta`` saves anything."""


TRANSPORTS: Mapping[str, TransportFacts] = MappingProxyType(
    {
        "broadcast": TransportFacts(("ray",), streamed=True, carries_delta=True),
        "local": TransportFacts(("inline",), streamed=True, carries_delta=False),
        "object_store": TransportFacts(("ray",), streamed=False, carries_delta=True),
        "shared_memory": TransportFacts(("ray", "inline"), streamed=False, carries_delta=True),
        "disk": TransportFacts(("ray", "inline"), streamed=False, carries_delta=False),
    }
)


def transport_of(transport: str, *, backend: str, shared: bool) -> str:
    """``param_update.transport``, with ``auto`` resolved: ``local`` where there is only one process."""
    if transport != "auto":
        return transport
    return "local" if shared or backend == "inline" else "broadcast"


def known_transport(name: str) -> str:
    """``name`` itself, if there is such a transport (or it is ``auto``)."""
    if name not in ("auto", *TRANSPORTS):
        raise ValueError(f"expected auto, {', '.join(TRANSPORTS)}")
    return name
