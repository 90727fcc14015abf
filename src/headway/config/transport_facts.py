"""Facts about each transport of weights: abilities, needs, purpose. No other file checks for a transport by name.

A transport consists of one line here and one file, ``engines/weights/transports/<name>.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

MOST_SENDERS = 8
"""Maximum number of ranks that send concurrently: more than a machine's network devices would only share these."""


@dataclass(frozen=True, slots=True)
class TransportFacts:
    meaning: str
    """Description of the transport in the configuration reference."""
    backends: tuple[str, ...]
    """Values of ``cluster.backend`` that the transport works with, if training and generation have separate devices."""
    leaves: Literal["files", "memory", "objects"] | None = None
    """Place where the sender leaves a version for receivers: files in ``param_update.directory``, files in memory, or
    the cluster's object store. None: sender and receivers run at the same time."""
    within_process: bool = False
    """True if sender and receiver are in one process, as on shared devices."""
    on_gpu: bool = False
    """True if buckets go from GPU to GPU when both ends have GPUs; otherwise through host memory."""
    most_senders: int = 1
    """Maximum number of trainer ranks that send a version concurrently, each its share, through host memory."""
    no_delta: str = ""
    """Reason why ``param_update.encoding: delta`` saves nothing; empty if it saves."""

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
"""Transports by name, in the order in which ``auto`` tries them."""

WITHIN_PROCESS = next(name for name, facts in TRANSPORTS.items() if facts.within_process)
"""The transport on shared devices."""


def transport_of(transport: str, *, backend: str, shared: bool) -> str:
    """Resolve ``param_update.transport``; ``auto`` is the first of the table that works with ``backend``."""
    if transport != "auto":
        return transport
    return WITHIN_PROCESS if shared else next(name for name, facts in TRANSPORTS.items() if backend in facts.backends)


def between_devices(transport: str, schedule: str, encoding: str, backend: str) -> bool:
    """Tell whether buckets go from GPU to GPU, if training and generation have separate GPUs.

    They do not with the schedule ``overlapped`` or with deltas: these copy the weights to host memory, and collectives
    between GPUs would compete with training.
    """
    on_gpu = TRANSPORTS[transport_of(transport, backend=backend, shared=False)].on_gpu
    return on_gpu and schedule == "synchronous" and encoding == "full"


def known_transport(name: str) -> str:
    """Return ``name`` itself. Raises `ValueError` unless it is a transport or ``auto``."""
    if name not in ("auto", *TRANSPORTS):
        raise ValueError(f"expected auto, {', '.join(TRANSPORTS)}")
    return name
