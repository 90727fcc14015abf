"""Transitions: three ways to turn training parts into generation parts, and what each costs a rank.

    everything   training parts are 1/N of each tensor (ZeRO-3); all-gather over all N ranks, keep what generation needs
    usual        training and generation both in consecutive ranks; all-gather over the training replica, keep the same
    regrouped    generation regrouped; all-gather over the micro data-parallel group, every byte of which is kept

They are the systems that HybridFlow's table of transition overheads compares (DeepSpeed-Chat, HybridFlow-V and
HybridFlow; arXiv:2409.19256, section 5). The model is gathered at once; a system that goes layer by layer has a lower
peak and the same volume.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from types import MappingProxyType

from headway.weights.regroup.layout import Interval, Layout, Rectangle
from headway.weights.regroup.placement import Groups, Placement, check, consecutive, micro_data_groups, regrouped


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one transition for one rank; all amounts are fractions of the model's bytes."""

    gathers_from: tuple[int, ...]
    """Ranks that take part in this rank's all-gather, itself included."""
    missing: Fraction
    """Share of the generation part that the rank does not hold: no way of communicating can move less."""
    received: Fraction
    """Share of the model that the all-gather brings from the other ranks: the volume of communication."""
    peak: Fraction
    """Size of the all-gather's result: `received`, and the rank's own training part, which is one piece of it."""
    redundant: Fraction
    """Share of the training part that the generation part lacks: kept as a second copy while generating."""


@dataclass(frozen=True)
class Transition:
    """Training parts and generation parts by rank, and the all-gathers between them.

    The training parts of a gather group are disjoint, and together they contain the generation part of each member.
    """

    before: tuple[Rectangle, ...]
    after: Placement
    gathers: Groups

    @cached_property
    def costs(self) -> tuple[Cost, ...]:
        """The cost of a transition for each rank, by rank."""
        group_of = {rank: group for group in self.gathers for rank in group}
        return tuple(self._cost(rank, group_of[rank]) for rank in range(len(self.before)))

    def _cost(self, rank: int, group: tuple[int, ...]) -> Cost:
        training, generation = self.before[rank], self.after.part(rank)
        both = training.overlap(generation).size
        gathered = sum((self.before[member].size for member in group), Fraction(0))
        return Cost(
            gathers_from=group,
            missing=generation.size - both,
            received=gathered - training.size,
            peak=gathered,
            redundant=training.size - both,
        )


def gather_everything(training: Layout, generation: Layout) -> Transition:
    """All-gather over all ranks, each of which trains 1/N of every tensor, N = pp·tp·dp (as DeepSpeed-Chat does).

    Of ``training`` only the number of devices counts. Raises `ConfigError` for layouts that cannot be regrouped.
    """
    check(training, generation)
    world = training.world
    whole = Interval.piece(0, 1)
    before = tuple(Rectangle(whole, Interval.piece(rank, world)) for rank in range(world))
    return Transition(before, consecutive(generation), (tuple(range(world)),))


def gather_usual(training: Layout, generation: Layout) -> Transition:
    """Place both in consecutive ranks; a rank gathers the model from its training replica, keeps its generation part.

    Raises `ConfigError` for layouts that cannot be regrouped.
    """
    check(training, generation)
    before = consecutive(training)
    return Transition(_parts(before), consecutive(generation), before.model_groups)


def gather_regrouped(training: Layout, generation: Layout) -> Transition:
    """Regroup generation, so that a rank gathers its generation part from its micro data-parallel group.

    Raises `ConfigError` for layouts that cannot be regrouped.
    """
    return Transition(
        _parts(consecutive(training)), regrouped(training, generation), micro_data_groups(training, generation)
    )


WAYS: Mapping[str, Callable[[Layout, Layout], Transition]] = MappingProxyType(
    {"everything": gather_everything, "usual": gather_usual, "regrouped": gather_regrouped}
)
"""The three ways by name, the dearest first."""


def _parts(placement: Placement) -> tuple[Rectangle, ...]:
    return tuple(placement.part(rank) for rank in range(placement.layout.world))
