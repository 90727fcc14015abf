"""Which processes are profiled, under which names."""

from __future__ import annotations

from typing import Any, cast

import pytest

from headway.cluster.profiled_processes import profiled
from headway.cluster.worker_group import PartOf, Worker


class Noting:
    """A worker that notes what it is called for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

        self.up = self.heartbeat = self.died = self.lost = self.kill = self.call

    async def call(self, method: str, *args: Any) -> Any:
        self.calls.append((method, args))


def workers(*names: str) -> list[Worker]:
    return [cast(Worker, Noting(name)) for name in names]


@pytest.mark.parametrize(
    ("separate", "names"),
    [(True, ["actor-0", "actor-1", "rollout-0"]), (False, ["actor-0_actor-1_rollout-0"])],
)
def test_each_process_is_there_once_named_after_all_that_is_in_it(separate: bool, names: list[str]):
    found = profiled(workers("actor-0", "actor-1", "rollout-0"), separate_processes=separate)
    assert [process.name for process in found] == names


async def test_a_replica_that_shares_a_ranks_process_shares_its_profile():
    actor, other = workers("actor-0", "actor-1")
    replica = PartOf(actor, "rollout", "rollout-0")
    shared, alone = profiled([actor, other, replica], separate_processes=True)
    assert (shared.name, alone.name) == ("actor-0_rollout-0", "actor-1")
    await shared.start()
    await shared.stop()
    await shared.take(1.5)
    assert cast(Noting, actor).calls == [
        ("profile.start", ()),
        ("profile.stop", ()),
        ("profile.take", (1.5, "actor-0_rollout-0")),
    ]
