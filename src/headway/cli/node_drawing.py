"""Drawing of a run's nodes, for ``--dry-run`` and the doctor: which ranks are on one machine, before any is known."""

from __future__ import annotations

from headway.config.sections.parallel import ParallelConfig
from headway.config.sizing.device_groups import NodeShare
from headway.config.sizing.placement import ACTOR, CRITIC, LOGP, REF, ROLLOUT, Placement

MOST_ROWS = 8
"""Most nodes that are drawn; of more, the first ones and the last one."""


def nodes_drawn(placement: Placement, parallel: ParallelConfig) -> dict[str, str]:
    """Return a line for each node of the run, by its name; none where there is one node and devices work alone.

    Line i has node i of each role. A role's ranks in one line are on one machine, those in different lines on different
    ones. The roles of a line share a machine where there is room for them.
    """
    count = max(share.node for share in placement.shares) + 1
    if count == 1 and parallel.is_plain and placement.per_replica == 1:
        return {}
    rows = {
        f"node {node}": ", ".join(
            filter(None, (_share(placement, share, parallel) for share in placement.shares if share.node == node))
        )
        for node in range(count)
    }
    lines = {"nodes": f"{count}; a line is one machine, or several where one has no room for all"}
    shown = list(rows.items())
    if len(shown) > MOST_ROWS:
        shown[MOST_ROWS - 2 : -1] = [("…", "")]
    lines |= shown
    across = [group for group in placement.groups(ACTOR, parallel.ep) if placement.straddles(group)]
    if across:
        lines["experts"] = f"ep {parallel.ep} is larger than a node: tokens travel between machines"
    return lines


def _share(placement: Placement, share: NodeShare, parallel: ParallelConfig) -> str:
    """Return the roles of a share, with those that have the same devices joined by ``+``."""
    drawn: dict[tuple[int, ...], list[str]] = {}
    for role, devices in placement.devices.items():
        here = share.only(devices).devices
        if not here:
            continue
        first, last = devices.index(here[0]), devices.index(here[-1])
        text = f"{role} {first}" if first == last else f"{role} {first}-{last}"
        if role in (ACTOR, REF, LOGP, CRITIC) and parallel.inner > 1:
            text += f" ({len(here) // parallel.inner} × {_inner(parallel)})"
        elif role == ROLLOUT and placement.per_replica > 1:
            text += f" ({len(here) // placement.per_replica} × tp {placement.per_replica})"
        same = next((other for other in drawn if set(other) & set(here)), here)
        drawn.setdefault(same, []).append(text)
    return ", ".join(" + ".join(texts) for texts in drawn.values())


def _inner(parallel: ParallelConfig) -> str:
    return " · ".join(f"{name} {size}" for name, size in (("cp", parallel.cp), ("tp", parallel.tp)) if size > 1)
