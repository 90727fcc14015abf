"""Facts about each transport of weights: abilities, needs, purpose. No other file asks for a transport by its name.

One line here and one file, ``engines/weights/transports/<name>.py``, make a transport.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

MOST_SENDERS = 8
"""Most ranks that send side by side: more than a machine has network devices would only share these."""


@dataclass(frozen=True, slots=True)
class TransportFacts:
    meaning: str
    """Words for the configuration reference on what the transport does."""
    backends: tuple[str, ...]
    """Values of ``cluster.backend`` that the transport works with, on devices of their own."""
    leaves: Literal["files", "memory", "objects"] | None = None
    """Place where the sender leaves a version for receivers: files in ``param_update.directory``, files in memory, or
    the cluster's object store. None: both ends run at the same time."""
    within_process: bool = False
    """True where both ends are in one process, as on shared devices."""
    on_gpu: bool = False
    """True where buckets go from GPU to GPU if both ends have them; otherwise through host memory."""
    most_senders: int = 1
    """Number of trainer ranks that may send a version side by side, each its share, through host memory."""
    no_delta: str = ""
    """Reason why ``param_update.encoding: delta`` saves nothing; empty where it does."""

    @property
    def streamed(self) -> bool:
        """Tell whether sender and receivers run at the same time."""
        return self.leaves is None

    @property
    def carries_delta(self) -> bool:
        return not self.no_delta


TRANSPORTS: Mapping[str, TransportFacts] = MappingProxyType(
    {
        "broadcast": TransportFacts("a process group of its own", ("ray",), on_gpu=True, most_senders=MOST_SENDERS),
        "local": TransportFacts(
            "copies inside one process",
            ("inline",),
            within_process=True,
            on_gpu=True,
            no_delta="inside one process nothing has to be sent",
        ),
        "object_store": TransportFacts("Ray's object store", ("ray",), leaves="objects", most_senders=MOST_SENDERS),
        "shared_memory": TransportFacts("memory that processes of one machine map", ("ray", "inline"), leaves="memory"),
        "disk": TransportFacts(
            "safetensors files, for whoever reads them",
            ("ray", "inline"),
            leaves="files",
            no_delta="its files are whole versions",
        ),
    }
)
"""Transports by name, in the order in which ``auto`` looks for one that works."""

WITHIN_PROCESS = next(name for name, facts in TRANSPORTS.items() if facts.within_process)
"""The transport on shared devices."""


def transport_of(transport: str, *, backend: str, shared: bool) -> str:
    """Resolve ``param_update.transport``; ``auto`` is the first of the table that works with ``backend``."""
    if transport != "auto":
        return transport
    return WITHIN_PROCESS if shared else next(name for name, facts in TRANSPORTS.items() if backend in facts.backends)


def between_devices(transport: str, schedule: str, encoding: str, backend: str) -> bool:
    """Tell whether buckets go from GPU to GPU, where training and generation have GPUs of their own.

    A copy of the weights, for the schedule ``overlapped`` and for deltas, is in host memory; and collectives between
    GPUs would compete with training.
    """
    on_gpu = TRANSPORTS[transport_of(transport, backend=backend, shared=False)].on_gpu
    return on_gpu and schedule == "synchronous" and encoding == "full"


def known_transport(name: str) -> str:
    """Return ``name`` itself. Raises `ValueError` unless it is a transport or ``auto``."""
    if name not in ("auto", *TRANSPORTS):
        raise ValueError(f"expected auto, {', '.join(TRANSPORTS)}")
    return name
