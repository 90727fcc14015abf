from __future__ import annotations

import asyncio
import socket
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import pytest

from headway.cluster.backend import start_backend
from headway.cluster.inline_cluster import InlineCluster
from headway.cluster.machine import worker_setup
from headway.cluster.machine.worker_setup import threads_of
from headway.cluster.on_ray.ray_cluster import MIN_OBJECT_STORE, check_answers, object_store_bytes
from headway.cluster.worker_engines import clock_offset
from headway.cluster.worker_group import Worker
from headway.cluster.worker_plan import ClusterPlan, plan_cluster, trainer_alone
from headway.config.schema import Config
from headway.config.sizing.placement import resolve_placement
from headway.errors import ConfigError


def plan(**sections: Any) -> ClusterPlan:
    config = Config(**sections)
    return plan_cluster(config, resolve_placement(config), model_path="m", total_optimizer_steps=10)


def test_each_rank_and_replica_is_a_worker_on_a_device_of_its_own() -> None:
    planned = plan(trainer={"n_gpus_per_node": 2}, rollout={"n_gpus_per_node": 3})
    assert [(s.name, s.device) for s in planned.workers] == [
        ("actor-0", 0),
        ("actor-1", 1),
        ("rollout-0", 2),
        ("rollout-1", 3),
        ("rollout-2", 4),
        ("episode-worker-0", 2),
    ]
    assert [s.arguments["rank"] for s in planned.workers[:2]] == [0, 1]
    assert {s.arguments["world_size"] for s in planned.workers[:2]} == {2}


def test_a_replica_of_several_devices_is_one_worker_that_has_them_all() -> None:
    rollout = {"nnodes": 2, "n_gpus_per_node": 4, "tensor_model_parallel_size": 2}
    planned = plan(trainer={"n_gpus_per_node": 2}, rollout=rollout)
    replicas = [spec for spec in planned.workers if spec.name.startswith("rollout")]
    assert [(spec.name, spec.devices) for spec in replicas] == [
        ("rollout-0", (2, 3)),
        ("rollout-1", (4, 5)),
        ("rollout-2", (6, 7)),
        ("rollout-3", (8, 9)),
    ]
    assert [rank.worker for rank in planned.ranks["rollout"]] == [spec.name for spec in replicas]
    assert [share.devices for share in planned.shares] == [(0, 1), (2, 3, 4, 5), (6, 7, 8, 9)]
    assert [spec.device for spec in planned.workers if spec.beside] == [2, 6], "an episode worker on each machine"


def test_threads_divide_the_cores_of_the_node_that_a_worker_lands_on_and_are_never_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert {s.threads for s in plan().workers if not s.beside} == {0}
    assert {s.threads for s in plan().workers if s.beside} == {1}
    monkeypatch.setattr(worker_setup, "available_cores", lambda: 12)
    assert [threads_of(0, sharing) for sharing in (1, 2, 5, 200)] == [12, 6, 2, 1]
    assert threads_of(3, 2) == 3


def test_only_processes_in_which_no_replica_sleeps_are_those_that_only_train() -> None:
    planned = plan(
        actor={"use_kl_loss": True},
        async_training={"use_rollout_log_probs": False},
        algorithm={"adv_estimator": "gae"},
        critic={"nnodes": 1},
        trainer={"n_gpus_per_node": 4, "use_nodes_ratios": (0.25, 0.25, 0.25, 0.25)},
    )
    alone = {spec.name for spec in planned.workers if spec.only_trains}
    assert alone == {"actor-0", "logp-0", "ref-0", "critic-0"}
    assert {spec.name for spec in planned.workers} - alone == {"rollout-0", "episode-worker-0"}
    assert not any(spec.only_trains for spec in plan(cluster={"placement": "shared"}).workers)
    both = {"cluster": {"placement": "shared"}, "trainer": {"n_gpus_per_node": 2}}
    assert [spec.name for spec in plan(**both).workers if spec.only_trains] == ["actor-1"], "a rank without a replica"


def test_threads_that_the_user_sets_are_kept() -> None:
    planned = plan(trainer={"threads": 3}, rollout={"threads": 5})
    assert [s.threads for s in planned.workers if not s.beside] == [3, 5]
    assert plan(trainer={"threads": 3}, cluster={"placement": "shared"}).workers[0].threads == 3


@pytest.mark.parametrize(
    ("sections", "devices"),
    [
        ({"rollout": {"nnodes": 2, "n_gpus_per_node": 3}}, [1, 4]),
        ({"trainer": {"nnodes": 3, "n_gpus_per_node": 2, "use_nodes_ratios": ("1/2", 0, 0, "1/2")}}, [3, 4]),
        (
            {
                "cluster": {"placement": "shared"},
                "trainer": {"nnodes": 2, "n_gpus_per_node": 4},
                "rollout": {"nnodes": 2, "n_gpus_per_node": 2},
            },
            [0, 4],
        ),
    ],
)
def test_an_episode_worker_is_beside_the_first_replica_of_each_node_that_has_some(
    sections: dict[str, Any], devices: list[int]
) -> None:
    planned = plan(**sections)
    assert [(s.name, s.device) for s in planned.workers if s.beside] == [
        (f"episode-worker-{index}", device) for index, device in enumerate(devices)
    ]


def test_what_is_reserved_by_node_are_the_devices_that_have_a_worker() -> None:
    planned = plan(trainer={"nnodes": 2, "n_gpus_per_node": 4, "use_nodes_ratios": (0.25, 0, 0, 0.5)})
    assert [(share.owner, share.node, share.devices) for share in planned.shares] == [
        ("trainer", 0, (0, 1)),
        ("trainer", 1, (4, 5, 6, 7)),
    ]


def test_a_trainer_without_the_others_reserves_its_own_devices_alone() -> None:
    whole = plan(trainer={"nnodes": 2, "n_gpus_per_node": 2}, rollout={"nnodes": 1, "n_gpus_per_node": 2})
    alone = trainer_alone(whole)
    assert {spec.name for spec in alone.workers} == {f"actor-{rank}" for rank in range(4)}
    assert {device for share in alone.shares for device in share.devices} == {spec.device for spec in alone.workers}
    assert len(whole.shares) > len(alone.shares)


def test_a_reference_without_ranks_of_its_own_runs_on_the_trainers() -> None:
    planned = plan(actor={"use_kl_loss": True})
    assert "ref" in planned.on_trainer_ranks
    assert "ref" not in planned.ranks
    assert planned.workers[0].arguments["with_reference"] is True


def test_a_reference_with_ranks_of_its_own_is_a_group_of_its_own() -> None:
    planned = plan(actor={"use_kl_loss": True}, ref={"nnodes": 1, "n_gpus_per_node": 2})
    assert "ref" not in planned.on_trainer_ranks
    assert [s.name for s in planned.ranks["ref"]] == ["ref-0", "ref-1"]
    assert planned.workers[0].arguments["with_reference"] is False


def test_on_shared_devices_actor_and_rollout_are_parts_of_one_worker() -> None:
    planned = plan(cluster={"placement": "shared"}, trainer={"n_gpus_per_node": 3}, rollout={"n_gpus_per_node": 2})
    assert [(s.name, s.role.__name__, s.device) for s in planned.workers] == [
        ("actor-0", "FusedRole", 0),
        ("actor-1", "FusedRole", 1),
        ("actor-2", "ActorRole", 2),
        ("episode-worker-0", "EpisodeWorkerRole", 0),
    ]
    assert [(rank.name, rank.worker, rank.part) for rank in (*planned.ranks["actor"], *planned.ranks["rollout"])] == [
        ("actor-0", "actor-0", "actor"),
        ("actor-1", "actor-1", "actor"),
        ("actor-2", "actor-2", None),
        ("rollout-0", "actor-0", "rollout"),
        ("rollout-1", "actor-1", "rollout"),
    ]
    assert planned.shared


def test_without_a_kl_loss_there_is_no_reference() -> None:
    planned = plan()
    assert ("ref" in planned.ranks, planned.on_trainer_ranks) == (False, frozenset())


async def test_one_process_has_one_rank_of_a_role() -> None:
    with pytest.raises(ConfigError, match=r"one ref rank, not 2.* ref.nnodes=1"):
        await InlineCluster(Config()).reserve(
            plan(actor={"use_kl_loss": True}, ref={"nnodes": 1, "n_gpus_per_node": 2})
        )


def test_the_object_store_holds_what_may_be_in_flight() -> None:
    assert object_store_bytes(Config()) >= MIN_OBJECT_STORE
    large = Config(
        rollout={"n": 16},  # type: ignore[arg-type]
        data={"max_prompt_length": 1000, "max_response_length": 9000},  # type: ignore[arg-type]
        actor={"ppo_mini_batch_size": 256},  # type: ignore[arg-type]
        async_training={"staleness_threshold": Fraction(1)},  # type: ignore[arg-type]
    )
    tokens = 16 * 10_000 * (2 * 256 + 256)
    assert object_store_bytes(large) >= tokens * 13


class OtherClock:
    """A worker whose monotonic clock is ahead by ``ahead`` seconds."""

    def __init__(self, ahead: float) -> None:
        self._ahead = ahead

    async def call(self, method: str) -> float:
        return asyncio.get_running_loop().time() + self._ahead


async def test_the_clock_of_another_machine_is_brought_to_the_drivers() -> None:
    assert await clock_offset(cast(Worker, OtherClock(1000.0))) == pytest.approx(-1000.0, abs=0.5)
    assert await clock_offset(cast(Worker, OtherClock(-3.0))) == pytest.approx(3.0, abs=0.5)


async def test_an_offset_within_the_round_trip_is_none() -> None:
    assert await clock_offset(cast(Worker, OtherClock(0.0))) == 0.0


async def test_a_ray_address_at_which_nothing_answers_is_a_config_error() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cluster.address=127.0.0.1:{port}: nothing answers"):
            await check_answers(f"127.0.0.1:{port}", 60.0)


async def test_an_address_at_which_something_else_than_ray_listens_is_a_config_error_in_bounded_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=r"no Ray cluster .*within 1 s"):
            await check_answers(f"127.0.0.1:{port}", 1.0)


@pytest.mark.slow
async def test_such_an_address_is_named_before_the_start_as_a_whole_runs_out_of_time(tmp_path: Path) -> None:
    """Asks an address that does not answer, which Ray takes its time for."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        cluster = {"backend": "ray", "device": "cpu", "address": address, "start_timeout_s": 8}
        with pytest.raises(ConfigError, match=f"cluster.address={address}: no Ray cluster"):
            await start_backend(
                Config(cluster=cluster),  # type: ignore[arg-type]
                model_path="m",
                run_dir=tmp_path,
                total_optimizer_steps=1,
            )
