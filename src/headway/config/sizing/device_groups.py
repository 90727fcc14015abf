"""Devices of one machine: what has to be on the same one, and in which order. Arithmetic over device numbers.

node share      devices of a role on one of its nodes             trainer, node 1: devices 4-7
device group    those of them that work as one                    (4, 5) and (6, 7), with an inner mesh of 2
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Devices that work as one, in the machine's order: those of a training rank's inner mesh, or of a replica."""

    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NodeShare:
    """Devices that are on one machine, in its order. Shares of one owner are on different machines; a machine that has
    room takes shares of several owners."""

    owner: str
    """Section of the settings whose ``nnodes`` counts such shares, like ``trainer``."""
    node: int
    """Index among the owner's shares."""
    devices: tuple[int, ...]

    def only(self, devices: Collection[int]) -> NodeShare:
        """Return the part of this share that consists of some of ``devices``."""
        chosen = frozenset(devices)
        return replace(self, devices=tuple(device for device in self.devices if device in chosen))


def node_shares(owner: str, devices: Sequence[int], per_node: int) -> tuple[NodeShare, ...]:
    """Return the shares of ``owner``, which fills node after node with ``per_node`` of its ``devices``."""
    starts = range(0, len(devices), per_node)
    return tuple(NodeShare(owner, node, tuple(devices[start : start + per_node])) for node, start in enumerate(starts))


def device_groups(devices: Sequence[int], size: int) -> Iterator[DeviceGroup]:
    """Yield neighbours among a role's ``devices``, ``size`` at a time."""
    for start in range(0, len(devices), size):
        yield DeviceGroup(tuple(devices[start : start + size]))
