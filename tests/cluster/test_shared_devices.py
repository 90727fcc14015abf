"""Before an engine takes memory of a device that it shares, what the training rank has cached there is given back."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from headway.cluster.roles.rollout_role import FusedRole, RolloutRole


class Engine:
    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    async def activate(self, version: int) -> float:
        self._calls.append(f"activate {version}")
        return 0.5

    async def wake(self) -> None:
        self._calls.append("wake")


@pytest.mark.parametrize("shares", [True, False])
async def test_the_trainers_cache_is_emptied_before_weights_are_loaded_and_before_the_engine_wakes(
    shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: calls.append("empty"))
    role: Any = object.__new__(RolloutRole)
    role.engine, role._device, role._shares_device = Engine(calls), "cuda:0", shares
    assert await role.activate(3) == 0.5
    await role.wake()
    empty = ["empty"] if shares else []
    assert calls == [*empty, "activate 3", *empty, "wake"]


def test_only_a_replica_in_the_process_of_a_training_rank_shares_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr("headway.cluster.roles.rollout_role.ActorRole", lambda **common: Mock())
    monkeypatch.setattr("headway.cluster.roles.rollout_role.RolloutRole", lambda **common: made.append(common))
    FusedRole(actor={}, rollout={"name": "rollout-0"}, name="actor-0")
    FusedRole(actor={}, rollout={"name": "rollout-0"}, name="actor-0+2")
    assert [role["name"] for role in made] == ["rollout-0", "rollout-0+2"]
    assert all(role["shares_device"] for role in made)
