"""The costs of transitions side by side, as a Markdown table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headway.weights.regroup.layout import Layout
from headway.weights.regroup.transition import WAYS, Transition

GB = 10**9


def table(transitions: Sequence[tuple[Layout, Layout]], models: Mapping[str, int]) -> str:
    """Write the table: for each pair (training, generation) three rows, one for each way.

    ``ranks`` is the size of a gather group; the amounts are `Cost`'s, of the rank that has most. ``models`` gives the
    bytes of each model's weights; for each it adds a column with GB (10⁹ bytes) received and redundant.
    """
    header = ["training → generation", "way", "ranks", "missing", "received", "peak", "redundant"]
    header += [f"{name}: received, redundant" for name in models]
    rows = [header, ["---"] * 2 + ["---:"] * (len(header) - 2)]
    for training, generation in transitions:
        for name, way in WAYS.items():
            rows.append([f"{training} → {generation}", name, *_amounts(way(training, generation), models)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _amounts(transition: Transition, models: Mapping[str, int]) -> list[str]:
    missing = max(cost.missing for cost in transition.costs)
    received = max(cost.received for cost in transition.costs)
    peak = max(cost.peak for cost in transition.costs)
    redundant = max(cost.redundant for cost in transition.costs)
    sizes = [f"{float(received * n / GB):.2f}, {float(redundant * n / GB):.2f} GB" for n in models.values()]
    return [str(len(transition.gathers[0])), str(missing), str(received), str(peak), str(redundant), *sizes]
