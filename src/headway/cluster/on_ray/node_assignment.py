"""Assignment of a run's devices to the nodes that a cluster has: which node share lies on which node. Arithmetic alone.

shares: trainer 0, trainer 1, rollout 0       nodes: a (8 free), b (4 free)
─▶ trainer 0 and rollout 0 on a, trainer 1 on b
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headway.config.sizing.placement import NodeShare

MOST_STEPS = 5_000
"""Most tries to lay a share on a node, for one number of nodes: nodes that are alike need one for each share."""


@dataclass(frozen=True, slots=True)
class Node:
    """A living node of a cluster, and how many devices it has: GPUs, or on CPUs processes."""

    id: str
    total: int
    free: int


def assign_nodes(shares: Sequence[NodeShare], nodes: Sequence[Node]) -> dict[int, str] | None:
    """Assign each device of ``shares`` to one of ``nodes``, by its id; None where they have no room.

    A share lies on one node, shares of one owner on different ones. As few nodes are used as possible, so that weights
    and tokens stay near; among those that suit, the first ones, each with the shares of like index.
    """
    largest_first = sorted(shares, key=lambda share: -len(share.devices))
    needed = sum(len(share.devices) for share in shares)
    least = max(Counter(share.owner for share in shares).values(), default=0)
    for most in range(least, min(len(nodes), len(shares)) + 1):
        if sum(sorted((node.free for node in nodes), reverse=True)[:most]) < needed:
            continue
        if (found := _Search(largest_first, nodes, most).run()) is not None:
            return {device: node for share, node in found for device in share.devices}
    return None


class _Search:
    """Depth-first search for nodes, at most ``most`` of them, for shares in their order."""

    def __init__(self, shares: Sequence[NodeShare], nodes: Sequence[Node], most: int) -> None:
        self._shares = shares
        self._nodes = nodes
        self._most = most
        self._free = {node.id: node.free for node in nodes}
        self._there: dict[str, list[NodeShare]] = {}
        """Shares on each node that is used, in the order in which nodes came into use."""
        self._steps = 0

    def run(self) -> list[tuple[NodeShare, str]] | None:
        if not self._lay(0):
            return None
        return [(share, node) for node, there in self._there.items() for share in there]

    def _lay(self, at: int) -> bool:
        """Lay share ``at`` and those after it. Leaves everything as it was where that cannot be."""
        if at == len(self._shares):
            return True
        share = self._shares[at]
        for node in self._candidates(share):
            self._steps += 1
            if self._steps > MOST_STEPS:
                return False
            self._there.setdefault(node, []).append(share)
            self._free[node] -= len(share.devices)
            if self._lay(at + 1):
                return True
            self._free[node] += len(share.devices)
            self._there[node].pop()
            if not self._there[node]:
                del self._there[node]
        return False

    def _candidates(self, share: NodeShare) -> Iterator[str]:
        """Nodes with room for ``share``: used ones first. Of nodes that are alike, the first alone."""
        unused = [node.id for node in self._nodes if node.id not in self._there]
        seen = set()
        for node in [*self._there, *(unused if len(self._there) < self._most else ())]:
            owners = frozenset(other.owner for other in self._there.get(node, ()))
            alike = (self._free[node], owners)
            if share.owner in owners or self._free[node] < len(share.devices) or alike in seen:
                continue
            seen.add(alike)
            yield node


def lacking(shares: Sequence[NodeShare], nodes: Sequence[Node], *, on_gpus: bool) -> str:
    """Describe what is asked of a cluster, and what it has, for a message."""
    one, several = ("GPU", "GPUs") if on_gpus else ("process", "processes")

    def of(count: int, devices: int) -> str:
        each = f"{devices} {one if devices == 1 else several}"
        return f"1 node with {each}" if count == 1 else f"{count} nodes with {each} each"

    asked = []
    for owner in dict.fromkeys(share.owner for share in shares):
        sizes = [len(share.devices) for share in shares if share.owner == owner]
        asked.append(f"{owner} asks for {of(len(sizes), max(sizes))} ({owner}.nnodes={len(sizes)})")
    alike = Counter((node.total, node.free) for node in nodes)
    has = [
        of(count, total) + ("" if on_gpus else " at most") + (f", {free} free" if free < total else "")
        for (total, free), count in sorted(alike.items(), reverse=True)
    ]
    return f"{', '.join(asked)}, and Ray has {' and '.join(has) or 'no node'}"
