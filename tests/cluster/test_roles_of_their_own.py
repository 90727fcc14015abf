"""Critic, log-probs and reference on ranks of their own: where they are placed, and a version's work with them.

One version is driven as the pipeline would: values, π_prox, advantages and returns, a critic's step, the actor's, an
update that the copy for log-probs gets with the replicas, and π_prox again.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from numpy.typing import NDArray

from headway.cluster.backend import start_backend
from headway.cluster.machine.token_files import TokenPart, read_rows
from headway.cluster.on_ray.ray_worker import RayWorker
from headway.cluster.worker_engines import LogpReceiver
from headway.cluster.worker_plan import ClusterPlan, plan_cluster
from headway.cluster.workers import Workers
from headway.config.schema import Config
from headway.config.sections.learning import ParallelConfig
from headway.config.sizing.placement import ACTOR, CRITIC, LOGP, REF, ROLLOUT, resolve_placement
from headway.data.interfaces.rollout import OnUpdate
from headway.data.interfaces.training import StepContext, StepReport
from headway.data.interfaces.weights import ReceiveReport, SendReport
from headway.data.packing import CollatedRow
from headway.data.types import Column, GroupTokens, Outcomes, RowTokens, TrainSample, TrajectoryId
from headway.engines.train.batch_advantages import BatchAdvantages
from headway.engines.train.fsdp.column_engines import FsdpCritic
from headway.engines.train.fsdp.device_mesh import TrainMesh
from headway.errors import ConfigError, RunError, WorkerDied
from headway.models.pretrained import load_model
from tests.cluster.one_version import generate, tiny_config
from tests.data.resolving import resolve
from tests.tiers import mostly_slow

Arrays = list[NDArray[np.float32]]
Get = Callable[[Any], Any]
STEPS = 4
OWN = {"logp": {"nnodes": 1}, "critic": {"nnodes": 1}, "ref": {"nnodes": 1}}
INSIDE = {"logp": {"nnodes": 0}, "critic": {"nnodes": 0}, "ref": {"nnodes": 0}}


def config(backend: str = "inline", **sections: Any) -> Config:
    base: dict[str, Any] = {
        "algorithm": {"adv_estimator": "gae", "gamma": 0.95, "lam": 0.9},
        "async_training": {"use_rollout_log_probs": False},
        "rollout": {"param_update_preduce_bucket_size_mb": 0.01},
        **OWN,
    }
    merged = {name: {**base.get(name, {}), **sections.get(name, {})} for name in base | sections}
    merged["critic"] = {"optim": {"lr": 1e-2}, **merged["critic"]}
    return tiny_config(backend, **merged)


# ---------------------------------------------------------------------------------------------- one version


@dataclass(frozen=True)
class Outcome:
    """Arrays, one per trajectory, and what was reported."""

    rows: list[CollatedRow]
    """With all their columns."""
    outcomes: Outcomes
    current: Arrays
    """The trainer's log-probs before its step, …"""
    critic_step: StepReport
    values_after: Arrays
    actor_step: StepReport
    current_after: Arrays
    """… and after it, …"""
    prox_after: Arrays
    """… which π_prox of version 1 should be."""


def arrays(columns: Sequence[Column], get: Get) -> Arrays:
    return [get(column.handle)[column.index] for column in columns]


async def update(workers: Workers, version: int, cfg: Config) -> tuple[SendReport, dict[str, ReceiveReport]]:
    """To replicas and whoever else holds the policy; each must then serve what the trainer has."""
    holders = [*workers.rollouts, *workers.receivers]
    names = [holder.name for holder in holders]
    await workers.trainer.reach(names)
    for replica in workers.rollouts:
        await replica.pause(OnUpdate.INTERRUPT)
    received: dict[str, ReceiveReport] = {}
    if cfg.param_update.schedule == "overlapped":
        gathered = await workers.trainer.gather_weights(version)
        probe = gathered.probe
        for copy in {holder.copy: None for holder in holders}:
            of_copy = [holder for holder in holders if holder.copy == copy]
            sent, *reports = await asyncio.gather(
                workers.trainer.send_gathered(version, [holder.name for holder in of_copy]),
                *(holder.stage_weights(version) for holder in of_copy),
            )
            received |= dict(zip([holder.name for holder in of_copy], reports, strict=True))
    else:
        sent, *reports = await asyncio.gather(
            workers.trainer.send_weights(version, names), *(holder.stage_weights(version) for holder in holders)
        )
        received, probe = dict(zip(names, reports, strict=True)), sent.probe
    for holder in holders:
        await holder.activate(version)
        served = await holder.probe()
        assert served is not None and probe is not None
        assert np.abs(served - probe).max() < workers.probe_tolerance(holder.name)
        if holder in workers.receivers:
            np.testing.assert_allclose(served, probe, atol=1e-5)
    for replica in workers.rollouts:
        await replica.resume()
    return sent, received


async def one_version(workers: Workers, cfg: Config, get: Get) -> Outcome:
    assert workers.reference is not None and workers.critic is not None and workers.proximal is not None
    groups = await generate(workers, range(2))
    trajectories = [(group, t) for group in groups for t in group.trajectories]
    samples = [TrainSample(group.tokens, t.id.k, t.prompt_length, t.length, t.id) for group, t in trajectories]
    outcomes = Outcomes(
        ids=tuple(t.id for _, t in trajectories),
        rewards=np.array([t.id.k - 1.5 + group.number for group, t in trajectories], np.float32),
        groups=np.array([group.number for group, _ in trajectories]),
        episode_of=np.arange(len(trajectories)),
    )
    current = arrays(await workers.trainer.forward_logprobs(samples), get)
    columns = {
        "ref_logprobs": await workers.reference.forward_logprobs(samples),
        "prox_logprobs": await workers.proximal.proximal_logprobs(samples, 0),
        "values": await workers.critic.forward_values(samples),
    }
    columns |= await workers.trainer.advantages(with_columns(samples, columns), outcomes)
    samples = with_columns(samples, columns)
    critic_step = await workers.critic.train_step(samples)
    values_after = arrays(await workers.critic.forward_values(samples), get)
    actor_step = await workers.trainer.train_step(samples, StepContext())
    await update(workers, 1, cfg)
    with pytest.raises(RunError, match="version 0"):
        await workers.proximal.proximal_logprobs(samples, 0)
    return Outcome(
        rows=resolve(samples, get),
        outcomes=outcomes,
        current=current,
        critic_step=critic_step,
        values_after=values_after,
        actor_step=actor_step,
        current_after=arrays(await workers.trainer.forward_logprobs(samples), get),
        prox_after=arrays(await workers.proximal.proximal_logprobs(samples, 1), get),
    )


def with_columns(samples: Sequence[TrainSample], columns: dict[str, list[Column]]) -> list[TrainSample]:
    return [replace(s, columns={name: of[i] for name, of in columns.items()}) for i, s in enumerate(samples)]


def itself(handle: Any) -> Any:
    return handle


def from_ray(handle: Any) -> Any:
    return read_rows(handle.file, handle.rows) if isinstance(handle, TokenPart) else ray.get(handle)


def assert_makes_sense(outcome: Outcome) -> None:
    """What one version's numbers have to do with each other, and with the pure functions."""
    columns = {name: [row.columns[name] for row in outcome.rows] for name in outcome.rows[0].columns}
    assert columns.keys() == {"ref_logprobs", "prox_logprobs", "values", "advantages", "returns"}
    for mine, current in zip(columns["prox_logprobs"], outcome.current, strict=True):
        np.testing.assert_allclose(mine, current, atol=1e-5)
    for reference, current in zip(columns["ref_logprobs"], outcome.current, strict=True):
        np.testing.assert_allclose(reference, current, atol=1e-5)  # nothing was trained yet
    assert all((values == 0).all() for values in columns["values"])
    algorithm = config().algorithm
    for name, expected in BatchAdvantages(algorithm)(outcome.rows, outcome.outcomes).items():
        for got, wanted in zip(columns[name], expected, strict=True):
            assert np.array_equal(got, wanted)
    assert not outcome.critic_step.skipped and not outcome.actor_step.skipped
    assert all(np.abs(values).max() > 0 for values in outcome.values_after if len(values))
    for now, before, prox in zip(outcome.current_after, outcome.current, outcome.prox_after, strict=True):
        assert np.abs(now - before).max() > 1e-3
        np.testing.assert_allclose(prox, now, atol=1e-5)


def assert_same(left: Outcome, right: Outcome, after_steps_within: float = 0.0) -> None:
    """To the last bit. What was computed after optimizer steps may differ by rounding from process to process."""
    for mine, theirs in zip(left.rows, right.rows, strict=True):
        assert np.array_equal(mine.input_ids, theirs.input_ids)
        for name, values in theirs.columns.items():
            assert np.array_equal(mine.columns[name], values), name
    assert left.critic_step == right.critic_step
    assert left.actor_step == right.actor_step
    for name in ("current", "values_after", "current_after", "prox_after"):
        for mine, theirs in zip(getattr(left, name), getattr(right, name), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=after_steps_within, err_msg=name)


async def start(cfg: Config, model: str, run_dir: Path) -> Workers:
    return await start_backend(cfg, model_path=model, run_dir=run_dir, total_optimizer_steps=STEPS)


# ---------------------------------------------------------------------------------------------- in one process


WAYS: list[dict[str, Any]] = [
    {},
    {"param_update": {"transport": "shared_memory"}},
    {"param_update": {"transport": "shared_memory", "encoding": "delta"}},
    {"param_update": {"transport": "disk"}},
    {"param_update": {"schedule": "overlapped"}},
    {"param_update": {"transport": "shared_memory", "encoding": "delta", "schedule": "overlapped"}},
    {"rollout": {"dtype": "bfloat16"}},
    {"rollout": {"dtype": "bfloat16"}, "param_update": {"transport": "shared_memory", "encoding": "delta"}},
    {"rollout": {"enable_dual_buffer": False, "n_gpus_per_node": 2}},
]


@mostly_slow("sections", WAYS, quick=[WAYS[5], WAYS[7]], ids=str)
async def test_a_version_goes_round_whichever_way_weights_take(
    tiny_model: str, tmp_path: Path, sections: dict[str, Any]
) -> None:
    cfg = config(**sections)
    workers = await start(cfg, tiny_model, tmp_path)
    try:
        assert workers.on_trainer_ranks == frozenset()
        assert [receiver.name for receiver in workers.receivers] == ["logp"]
        assert_makes_sense(await one_version(workers, cfg, itself))
        whole = load_model(tiny_model, dtype=torch.float32).num_parameters() * 4
        _, received = await update(workers, 2, cfg)  # nothing was trained in between
        if cfg.param_update.encoding == "delta":
            assert 0 < received["logp"].nbytes < 0.01 * whole
    finally:
        await workers.close()


async def test_ranks_of_their_own_compute_what_the_trainers_ranks_would(tiny_model: str, tmp_path: Path) -> None:
    outcomes = []
    for sections in (OWN, INSIDE):
        cfg = config(**sections)
        workers = await start(cfg, tiny_model, tmp_path)
        try:
            assert workers.on_trainer_ranks == (frozenset() if sections is OWN else {"ref", "logp", "critic"})
            assert (workers.proximal is workers.trainer) is (sections is INSIDE)
            outcomes.append(await one_version(workers, cfg, itself))
        finally:
            await workers.close()
    assert_same(*outcomes)


@pytest.mark.slow
async def test_on_shared_devices_a_critic_and_a_reference_of_their_own_change_nothing(
    tiny_model: str, tmp_path: Path
) -> None:
    outcomes = []
    for sections in (INSIDE, {**OWN, "logp": {"nnodes": 0}}):
        cfg = config(cluster={"placement": "shared"}, **sections)
        workers = await start(cfg, tiny_model, tmp_path)
        try:
            assert workers.on_trainer_ranks == ({"ref", "logp", "critic"} if sections is INSIDE else {"logp"})
            outcomes.append(await one_version(workers, cfg, itself))
            assert_makes_sense(outcomes[-1])
        finally:
            await workers.close()
    assert_same(*outcomes)


async def test_the_critic_is_the_engine_that_it_is_made_of_and_comes_back_from_a_checkpoint(
    tiny_model: str, tmp_path: Path
) -> None:
    cfg = config(
        actor={"ppo_epochs": 2}, critic={"ppo_epochs": 4, "optim": {"lr": 1e-2, "lr_scheduler_type": "linear"}}
    )
    workers = await start(cfg, tiny_model, tmp_path)
    try:
        outcome = await one_version(workers, cfg, itself)
        # STEPS of the actor in two epochs each: two mini-batches, which the critic sees four times
        twin = FsdpCritic(
            model_path=tiny_model,
            config=cfg,
            total_optimizer_steps=8,
            mesh=TrainMesh.make(ParallelConfig(), torch.device("cpu")),
        )
        assert twin.train_step(outcome.rows) == outcome.critic_step
        for mine, theirs in zip(twin.forward_values(outcome.rows), outcome.values_after, strict=True):
            assert np.array_equal(mine, theirs)
        critic = workers.critic
        assert critic is not None
        await critic.save(tmp_path / "critic")
        samples = [
            TrainSample(
                as_group(row), 0, row.prompt_length, len(row.logprobs), episode_of(row), columns=as_columns(row)
            )
            for row in outcome.rows
        ]
        second = await critic.train_step(samples)
        assert second == twin.train_step(outcome.rows)
        await critic.load(tmp_path / "critic")
        assert await critic.train_step(samples) == second
    finally:
        await workers.close()


def as_group(row: CollatedRow) -> GroupTokens:
    """A group of this row alone."""
    prompt, response = np.split(row.input_ids, [row.prompt_length])
    return (RowTokens(prompt, response, row.logprobs, row.versions, row.loss_mask, row.turns),)


def episode_of(row: CollatedRow) -> TrajectoryId:
    assert row.episode is not None
    return row.episode


def as_columns(row: CollatedRow) -> dict[str, Column]:
    return {name: Column([values], 0) for name, values in row.columns.items()}


async def test_a_run_that_asks_for_none_of_them_has_none(tiny_model: str, tmp_path: Path) -> None:
    cfg = tiny_config("inline", actor={"use_kl_loss": False})
    workers = await start(cfg, tiny_model, tmp_path)
    try:
        assert (workers.reference, workers.proximal, workers.critic) == (None, None, None)
        assert list(workers.receivers) == [] and workers.on_trainer_ranks == frozenset()
    finally:
        await workers.close()


async def test_one_process_has_one_rank_of_the_critic(tiny_model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"one critic rank, not 2.*critic\.nnodes=1"):
        await start(config(critic={"n_gpus_per_node": 2}), tiny_model, tmp_path)


# ---------------------------------------------------------------------------------------------- on Ray


@pytest.mark.slow
@pytest.mark.usefixtures("workers_can_import_tests")
async def test_on_ray_a_version_equals_one_process_and_the_death_of_a_copy_is_told(
    tiny_model: str, tmp_path: Path
) -> None:
    """Starts a Ray of its own and five workers that import torch."""
    inline = await start(config(), tiny_model, tmp_path)
    expected = await one_version(inline, config(), itself)
    await inline.close()
    cfg = config("ray", trainer={"threads": 1}, cluster={"start_timeout_s": 400})
    workers = await start(cfg, tiny_model, tmp_path)
    try:
        assert workers.on_trainer_ranks == frozenset()
        outcome = await one_version(workers, cfg, from_ray)
        assert_makes_sense(outcome)
        assert_same(outcome, expected, after_steps_within=1e-6)
        [copy] = workers.receivers
        assert isinstance(copy, LogpReceiver)
        [rank] = copy._ranks.workers
        assert isinstance(rank, RayWorker) and rank.pid is not None
        death = asyncio.create_task(workers.restartable[LOGP].watch())
        os.kill(rank.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            with pytest.raises(WorkerDied, match=r"worker logp-0 died.*logp-0\.log"):
                await death
    finally:
        await workers.close()
    assert not ray.is_initialized()
    logs = {path.stem for path in (tmp_path / "logs").iterdir()} - {"ray"}  # which may tell of the death in time
    assert logs == {"actor-0", "rollout-0", "ref-0", "logp-0", "critic-0", "episode-worker-0"}


@pytest.mark.slow
@pytest.mark.usefixtures("workers_can_import_tests")
async def test_on_ray_two_ranks_each_get_their_shares_and_deltas_in_their_own_dtype(
    tiny_model: str, tmp_path: Path
) -> None:
    """Replicas are served in bfloat16, log-probs recomputed in float32: two layouts of the same weights."""
    cfg = config(
        "ray",
        rollout={"dtype": "bfloat16"},
        logp={"n_gpus_per_node": 2},
        critic={"n_gpus_per_node": 2},
        ref={"nnodes": 0},
        param_update={"transport": "broadcast", "encoding": "delta"},
    )
    workers = await start(cfg, tiny_model, tmp_path)
    try:
        assert workers.on_trainer_ranks == {"ref"}
        assert [receiver.name for receiver in workers.receivers] == ["logp"]
        assert_makes_sense(await one_version(workers, cfg, from_ray))
        again, received = await update(workers, 2, cfg)
        assert again.changed == 0 and again.full_nbytes is not None
        assert all(0 < report.nbytes < 0.01 * again.full_nbytes for report in received.values())
        assert received["logp"].checksum != received["rollout-0"].checksum
    finally:
        await workers.close()


# ---------------------------------------------------------------------------------------------- placement


def asking(*roles: str, **sections: Any) -> Config:
    """A configuration whose algorithm asks for ``roles``."""
    base: dict[str, Any] = {"algorithm": {}, "actor": {}, "async_training": {}}
    if CRITIC in roles:
        base["algorithm"] = {"adv_estimator": "gae"}
    if REF in roles:
        base["actor"] = {"use_kl_loss": True}
    if LOGP in roles:
        base["async_training"] = {"use_rollout_log_probs": False}
    return Config(**{name: {**base.get(name, {}), **sections.get(name, {})} for name in base | sections})


ALL = (REF, LOGP, CRITIC)


def shares(devices: int, *ratios: object, roles: Sequence[str] = (), **sections: Any) -> Config:
    return asking(*roles, trainer={"n_gpus_per_node": devices, "use_nodes_ratios": ratios}, **sections)


def planned(of: Config, **named: Any) -> ClusterPlan:
    return plan_cluster(of, resolve_placement(of), model_path="m", **{"total_optimizer_steps": 10, **named})


def test_by_counts_each_role_follows_the_last_on_devices_of_its_own() -> None:
    of = asking(
        *ALL,
        trainer={"n_gpus_per_node": 2},
        rollout={"n_gpus_per_node": 3},
        ref={"nnodes": 1},
        logp={"nnodes": 2, "n_gpus_per_node": 2},
        critic={"nnodes": 1, "n_gpus_per_node": 2},
    )
    placed = resolve_placement(of)
    assert dict(placed.devices) == {
        ACTOR: (0, 1),
        ROLLOUT: (2, 3, 4),
        REF: (5,),
        LOGP: (6, 7, 8, 9),
        CRITIC: (10, 11),
    }
    assert (placed.total, placed.idle) == (12, ())
    plan = planned(of)
    assert plan.on_trainer_ranks == frozenset()
    for role, count in (("Ref", 1), ("Logp", 4), ("Critic", 2)):
        ranks = plan.ranks[role.lower()]
        assert [rank.name for rank in ranks] == [f"{role.lower()}-{i}" for i in range(count)]
        specs = [spec for spec in plan.workers if spec.role.__name__ == f"{role}Role"]
        assert [(s.name, s.arguments["rank"], s.arguments["world_size"]) for s in specs] == [
            (rank.name, i, count) for i, rank in enumerate(ranks)
        ]
    assert [s.device for s in plan.workers if not s.beside] == list(range(12))
    assert plan.workers[0].arguments["total_critic_steps"] is None


def test_without_devices_of_their_own_they_are_the_trainers_ranks() -> None:
    of = asking(*ALL, trainer={"n_gpus_per_node": 2})
    placed, plan = resolve_placement(of), planned(of)
    assert {placed.devices[role] for role in (ACTOR, *ALL)} == {(0, 1)}
    assert plan.on_trainer_ranks == {REF, LOGP, CRITIC}
    assert plan.ranks.keys() == {ACTOR, ROLLOUT}
    assert {s.name for s in plan.workers} == {"actor-0", "actor-1", "rollout-0", "episode-worker-0"}
    assert plan.workers[1].arguments["with_reference"] is True
    assert plan.workers[1].arguments["total_critic_steps"] == 10


def test_a_role_that_nothing_asks_for_gets_no_device_even_if_it_is_given_some() -> None:
    of = asking(ref={"nnodes": 1}, logp={"nnodes": 1}, critic={"nnodes": 1})
    placed, plan = resolve_placement(of), planned(of)
    assert placed.devices.keys() == {ACTOR, ROLLOUT} and placed.total == 2
    assert (plan.on_trainer_ranks, plan.ranks.keys()) == (frozenset(), {ACTOR, ROLLOUT})


def test_interpolated_log_probs_need_no_role() -> None:
    of = asking(LOGP, actor={"prox_logp_method": "loglinear"}, logp={"nnodes": 1})
    assert LOGP not in resolve_placement(of).devices


@pytest.mark.parametrize(("actor_epochs", "critic_epochs", "steps"), [(1, 1, 12), (2, 1, 6), (1, 3, 36), (4, 2, 6)])
def test_the_critics_schedule_ends_with_the_run(actor_epochs: int, critic_epochs: int, steps: int) -> None:
    """12 optimizer steps of the actor; the critic's mini-batches are the same ones, in epochs of its own."""
    of = asking(
        CRITIC, actor={"ppo_epochs": actor_epochs}, critic={"ppo_epochs": critic_epochs, "nnodes": 1}
    )  # fmt: skip
    critic = next(spec for spec in planned(of, total_optimizer_steps=12).workers if spec.name == "critic-0")
    assert critic.arguments["total_critic_steps"] == steps


def test_on_shared_devices_the_critic_may_have_ranks_of_its_own() -> None:
    of = asking(CRITIC, LOGP, cluster={"placement": "shared"}, critic={"nnodes": 1})
    plan = planned(of)
    assert [(s.name, s.role.__name__, s.device) for s in plan.workers] == [
        ("actor-0", "FusedRole", 0),
        ("critic-0", "CriticRole", 1),
        ("episode-worker-0", "EpisodeWorkerRole", 0),
    ]
    assert plan.on_trainer_ranks == {LOGP} and plan.shared


def test_shares_lie_side_by_side_where_they_fit_and_the_critic_comes_on_top() -> None:
    of = shares(8, 0.25, 0.25, "1/8", 0.375, roles=ALL, critic={"nnodes": 1, "n_gpus_per_node": 2})
    placed = resolve_placement(of)
    assert dict(placed.devices) == {
        ACTOR: (0, 1),
        LOGP: (2, 3),
        REF: (4,),
        ROLLOUT: (5, 6, 7),
        CRITIC: (8, 9),
    }
    assert placed.total == 10
    assert planned(of).on_trainer_ranks == frozenset()


def test_shares_that_leave_devices_over_leave_them_idle() -> None:
    placed = resolve_placement(shares(8, 0.25, 0.125, 0, 0.25, roles=(LOGP,)))
    assert dict(placed.devices) == {ACTOR: (0, 1), LOGP: (2,), ROLLOUT: (6, 7)}
    assert placed.idle == (3, 4, 5)


def test_shares_that_add_up_to_more_than_all_put_log_probs_on_the_trainers_devices() -> None:
    of = shares(4, 0.5, 0.5, 0.5, 0.5, roles=(LOGP, REF))
    placed = resolve_placement(of)
    assert dict(placed.devices) == {ACTOR: (0, 1), LOGP: (0, 1), REF: (0, 1), ROLLOUT: (2, 3)}
    assert planned(of).on_trainer_ranks == {LOGP, REF}


def test_a_share_of_none_computes_log_probs_inside_the_batch() -> None:
    of = shares(4, 0.5, 0, 0, 0.5, roles=ALL)
    placed = resolve_placement(of)
    assert {placed.devices[role] for role in (ACTOR, *ALL)} == {(0, 1)}
    assert planned(of).on_trainer_ranks == {REF, LOGP, CRITIC}


@pytest.mark.parametrize(
    ("devices", "ratios", "roles", "complaint"),
    [
        (4, (0.5, 0.1, 0, 0.25), (LOGP,), "logp's share 0.1 of 4 devices is 0.4 devices; expected whole numbers"),
        (3, ("1/3", 0.5, 0.5, "1/3"), (LOGP, REF), "logp's share 0.5 of 3 .* ref_logp's share 0.5 of 3 devices is 1.5"),
        (4, (0.5, 0.25, 0, 0.25), (), "logp's share must be 0: .*use_rollout_log_probs=false .*recompute"),
        (4, (0.5, 0, 0.25, 0.25), (LOGP,), "ref_logp's share must be 0: .*use_kl_loss or algorithm.use_kl_in_reward"),
        (4, (0.25, 0.5, 0, 0.5), (LOGP,), "logp lies on train's devices, but has 2 where train has 1"),
        (4, (0, 0.5, 0, 0.5), (LOGP,), "train has 0 and generate 2 of 4 devices, expected at least 1 each"),
        (4, (0.75, 0.25, 0, 0.5), (LOGP,), "train and generate together have 5 of 4 devices"),
    ],
)
def test_shares_that_do_not_fit_say_which_and_why(
    devices: int, ratios: tuple[object, ...], roles: tuple[str, ...], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=rf"trainer\.use_nodes_ratios: .*{complaint}"):
        resolve_placement(shares(devices, *ratios, roles=roles))


def test_every_share_that_is_wrong_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        resolve_placement(shares(4, Fraction(3, 4), Fraction(1, 4), Fraction(1, 4), Fraction(1, 2)))
    for complaint in ("together have 5 of 4", "logp's share must be 0", "ref_logp's share must be 0"):
        assert complaint in str(error.value)
