"""A worker as the protocol that its role keeps."""

from __future__ import annotations

from typing import Any, cast
from unittest.mock import Mock

import pytest

from headway.cluster.roles.training_roles import ActorRole, CriticRole, LogpRole, RefRole
from headway.cluster.weight_sync.weight_sync import WeightPaths
from headway.cluster.worker_engines import TrainGroup, critic_of, reference_of
from headway.cluster.worker_group import WorkerGroup, proxy, registered
from headway.data.interfaces.rollout import OnUpdate, RolloutEngine
from headway.data.interfaces.training import CriticEngine, ProximalEngine
from tests.cluster.test_worker_group import Scripted, samples


class Callee:
    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    async def call(self, method: str, *args: Any) -> Any:
        self.asked.append((method, *args))
        return len(self.asked)


def ranks(role: type) -> WorkerGroup:
    return WorkerGroup(role, [Scripted(0)])


def asked_by(made: object) -> set[str]:
    """The names of all calls that a proxy can make."""
    return {call.args[0] for call in vars(made).values()}


async def test_each_method_is_a_call_by_its_name_of_a_part_where_that_is_asked() -> None:
    callee = Callee()
    engine = proxy(callee, RolloutEngine, part="engine")
    assert [await engine.pause(OnUpdate.DRAIN), await engine.activate(7)] == [1, 2]
    assert await proxy(callee, CriticEngine, train_step="critic_step").train_step([]) == 3
    assert callee.asked == [("engine.pause", OnUpdate.DRAIN), ("engine.activate", 7), ("critic_step", [])]


def test_what_is_no_coroutine_method_of_the_protocol_is_not_there() -> None:
    engine = proxy(Callee(), RolloutEngine)
    for name in ("generate", "slots", "call", "train_step"):
        assert not hasattr(engine, name)


OF_THE_GROUP = {"begin_batch", "end_batch"}
"""What a group of ranks does itself, and tells them."""


@pytest.mark.parametrize(
    ("made", "role"),
    [
        (critic_of, ActorRole),
        (critic_of, CriticRole),
        (reference_of, ActorRole),
        (reference_of, RefRole),
        (lambda group: proxy(group, ProximalEngine), LogpRole),
    ],
)
def test_ranks_register_all_that_they_are_asked(made: Any, role: type) -> None:
    assert asked_by(made(ranks(role))) <= registered(role).keys() | OF_THE_GROUP


def test_the_trainers_ranks_register_what_is_taken_from_them_as_it_is() -> None:
    group = TrainGroup(ranks(ActorRole), cast(WeightPaths, Mock()))
    of_paths = {"reach", "send_weights", "gather_weights", "send_gathered"}
    taken = asked_by(group._engine) & set(dir(group)) - set(dir(TrainGroup)) - of_paths
    steps = {"forward_logprobs", "proximal_logprobs", "train_step", "copy_state"}
    assert taken == steps | {"save", "load"} | OF_THE_GROUP
    assert taken <= registered(ActorRole).keys() | OF_THE_GROUP


async def test_a_group_is_asked_as_by_its_attribute() -> None:
    group = ranks(ActorRole)
    (column,) = await reference_of(group).forward_logprobs(samples(1))
    assert column.handle[0] == 0
    with pytest.raises(AttributeError, match="'lost' is not a registered"):
        await group.call("lost")
