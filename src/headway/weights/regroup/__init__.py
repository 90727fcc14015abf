"""Regrouping: from the layout that trains to the layout that generates, on the same devices, without a second copy.

    layout      who is where, and which part of the model a place holds           (exact fractions)
    placement   ranks assigned to a layout's places: the groups, consecutive or regrouped
    transition  what one way from the one to the other costs each rank
    table       the costs of several transitions side by side

Pure arithmetic: no tensors, no communication. The idea is the 3D-HybridEngine of HybridFlow (arXiv:2409.19256,
section 5); `docs/regrouping.md` explains it with a drawing.
"""

from headway.weights.regroup.layout import Coordinates, Interval, Layout, Rectangle
from headway.weights.regroup.placement import Placement, consecutive, micro_data_groups, regrouped
from headway.weights.regroup.table import table
from headway.weights.regroup.transition import (
    WAYS,
    Cost,
    Transition,
    gather_everything,
    gather_regrouped,
    gather_usual,
)

__all__ = [
    "WAYS",
    "Coordinates",
    "Cost",
    "Interval",
    "Layout",
    "Placement",
    "Rectangle",
    "Transition",
    "consecutive",
    "gather_everything",
    "gather_regrouped",
    "gather_usual",
    "micro_data_groups",
    "regrouped",
    "table",
]
