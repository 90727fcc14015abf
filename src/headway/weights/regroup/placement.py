"""Placements: which rank takes which place of a layout, and the groups that follow from it.

For pp=1 tp=4 dp=2 → pp=1 tp=2 dp=4, ranks written under the tensor shards that they hold:

    training        0 1 2 3 | 4 5 6 7          shards ¼ ½ ¾ 1, two replicas
    consecutive     0 1 | 2 3 | 4 5 | 6 7      1 and 2 (5 and 6) are given a half that lacks their quarter
    regrouped       0 2 | 1 3 | 4 6 | 5 7      every half has its rank's quarter in it
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from headway.errors import ConfigError
from headway.weights.regroup.layout import Coordinates, Layout, Rectangle

Groups = tuple[tuple[int, ...], ...]
"""Groups of ranks, in the order of their lowest rank."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A layout whose places are taken: ``places[rank]`` is the place of ``rank``, each place taken once.

    Members of a group are in the order of the coordinate in which they differ: the order that a collective over the
    group needs.
    """

    layout: Layout
    places: tuple[Coordinates, ...]

    def part(self, rank: int) -> Rectangle:
        """The part of the model that ``rank`` holds."""
        return self.layout.part(self.places[rank])

    @property
    def tensor_groups(self) -> Groups:
        """Groups of ranks that differ in tp alone: together they compute one stage of one replica."""
        return self._groups(lambda at: (at.pp, at.dp))

    @property
    def pipeline_groups(self) -> Groups:
        """Groups of ranks that differ in pp alone."""
        return self._groups(lambda at: (at.dp, at.tp))

    @property
    def data_groups(self) -> Groups:
        """Groups of ranks that differ in dp alone: they hold the same part."""
        return self._groups(lambda at: (at.pp, at.tp))

    @property
    def model_groups(self) -> Groups:
        """Groups of ranks of the same dp: together they hold the model once. Ordered by pp, then tp."""
        return self._groups(lambda at: at.dp)

    def _groups(self, key: Callable[[Coordinates], Hashable]) -> Groups:
        return _group_by(range(self.layout.world), lambda rank: key(self.places[rank]), self.places.__getitem__)


def consecutive(layout: Layout) -> Placement:
    """Place ranks in Megatron's order (`Layout.coordinates`): the usual way, for training and for generation."""
    return Placement(layout, tuple(layout.coordinates(rank) for rank in range(layout.world)))


def regrouped(training: Layout, generation: Layout) -> Placement:
    """Place ranks for generation so that each one's training part lies inside its generation part.

    With s = pp / pp′ stages and c = tp / tp′ shards to be joined, a rank that trains at (pp, dp, tp) generates at

        pp′ = pp ÷ s,   tp′ = tp ÷ c,   dp′ = dp · s · c + (pp mod s) · c + (tp mod c)        (÷ rounds down)

    Stages and shards that are joined are neighbours in the model, so a tensor group takes every c-th rank of a
    training tensor group. Training is placed in Megatron's order. Raises `ConfigError` as `check` does.
    """
    check(training, generation)
    stages, shards = training.pp // generation.pp, training.tp // generation.tp

    def place(at: Coordinates) -> Coordinates:
        (pp, stage), (tp, shard) = divmod(at.pp, stages), divmod(at.tp, shards)
        return Coordinates(pp=pp, dp=(at.dp * stages + stage) * shards + shard, tp=tp)

    return Placement(generation, tuple(place(at) for at in consecutive(training).places))


def micro_data_groups(training: Layout, generation: Layout) -> Groups:
    """Groups of pp·tp / (pp′·tp′) ranks whose training parts make up the generation part of each, once `regrouped`.

    They are the ranks of one training replica that generate with the same part: the only ranks that a rank has to
    gather from. Ordered by training stage, then training shard: the order in which an all-gather joins the parts.
    """
    before, after = consecutive(training).places, regrouped(training, generation).places

    def key(rank: int) -> Hashable:
        return before[rank].dp, after[rank].pp, after[rank].tp

    return _group_by(range(training.world), key, before.__getitem__)


def check(training: Layout, generation: Layout) -> None:
    """Raise `ConfigError` unless one layout can be regrouped into the other: as many devices, degrees that divide."""
    if training.world != generation.world:
        raise ConfigError(
            f"training ({training}) has {training.world} devices and generation ({generation}) has "
            f"{generation.world}; regrouping is between two layouts of the same devices: pp·tp·dp must be equal"
        )
    for name, before, after in (("pp", training.pp, generation.pp), ("tp", training.tp, generation.tp)):
        if before % after:
            raise ConfigError(
                f"generation has {name}={after}, which does not divide training's {name}={before} "
                f"(training {training}, generation {generation}). Supported is a generation degree that divides "
                f"the training degree, so that a generation part is made of whole training parts: "
                f"{name}={', '.join(str(n) for n in range(1, before + 1) if before % n == 0)}"
            )


def _group_by(ranks: range, key: Callable[[int], Hashable], order: Callable[[int], Coordinates]) -> Groups:
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for rank in ranks:
        groups[key(rank)].append(rank)
    return tuple(tuple(sorted(group, key=order)) for group in groups.values())
