"""A start, over a cluster whose workers do what the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest

from headway.cluster import backend, startup
from headway.cluster.backend import start_backend
from headway.cluster.worker_plan import ClusterPlan, WorkerSpec
from headway.cluster.workers import StartWaits
from headway.data.interfaces.rollout import Capabilities, OnUpdate
from headway.engines.weights.weight_layout import Manifest
from headway.errors import ConfigError, ModelError, RunError, StallError, WorkerDied
from headway.models.model_folder import hidden_size
from headway.planner.simulation.virtual_clock import run_virtual
from headway.runtime.progress import Heartbeat
from tests.cluster.one_version import tiny_config


class PlannedWorker:
    """Hangs in, or fails with, what the cluster's script says for ``name.method``."""

    def __init__(self, name: str, cluster: PlannedCluster) -> None:
        self.name = name
        self._cluster = cluster

    async def up(self) -> None:
        await self._cluster.answer(self.name, "up")

    async def call(self, method: str, *args: Any) -> Any:
        return await self._cluster.answer(self.name, method)

    async def keep(self, method: str, parts: Sequence[Sequence[int]], *args: Any) -> Any:
        return await self._cluster.answer(self.name, method)

    async def each(self, method: str, *args: Any, apart_s: float = 0.0) -> AsyncGenerator[Any, None]:
        yield method, args

    def close(self) -> None: ...

    def peer(self) -> PlannedWorker:
        return self

    async def heartbeat(self) -> Heartbeat:
        return Heartbeat("")

    async def died(self) -> NoReturn:
        await self._cluster.answer(self.name, "died")
        raise WorkerDied(f"worker {self.name} died")

    async def lost(self) -> NoReturn:
        await self.died()

    async def kill(self) -> None:
        self._cluster.log.append(f"{self.name} killed")


class PlannedCluster:
    separate_processes = False
    machines = 1
    on_update = frozenset(OnUpdate)

    def __init__(self, hangs: frozenset[str] = frozenset(), failures: dict[str, Exception] | None = None) -> None:
        self.log: list[str] = []
        self.calls: list[str] = []
        self.launched: list[WorkerSpec] = []
        self._hangs = hangs
        self._failures = failures or {}

    async def answer(self, name: str, method: str) -> Any:
        if f"{name}.{method}" in self._hangs:
            await asyncio.Event().wait()
        if method in ("up", "build"):
            self.calls.append(f"{name} {method}")
        if failure := self._failures.get(f"{name}.{method}"):
            raise failure
        answers = {
            "layout": Manifest(slots=()),
            "monotonic": asyncio.get_running_loop().time(),
            "serve": Capabilities(on_update=self.on_update, reproducible=True),
        }
        return answers.get(method.rpartition(".")[2])

    async def connect(self) -> str:
        return "cpu"

    async def reserve(self, plan: ClusterPlan) -> None:
        self.log.append("reserved")

    def launch(self, spec: WorkerSpec) -> PlannedWorker:
        self.launched.append(spec)
        return PlannedWorker(spec.name, self)

    async def died(self) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def stop(self) -> None:
        self.log.append("stopped")


EVERYTHING_ENDED = ["rollout-0 killed", "actor-0 killed", "episode-worker-0 killed", "stopped"]


async def start(
    cluster: PlannedCluster,
    monkeypatch: pytest.MonkeyPatch,
    timeout_s: float = 60.0,
    model_path: str = "m",
    warm: Awaitable[None] | None = None,
    shared: bool = False,
    **sections: Any,
) -> backend.Workers:
    monkeypatch.setattr(backend, "make_cluster", lambda config, run_dir, model_path: cluster)
    given = {"start_timeout_s": timeout_s} | ({"placement": "shared"} if shared else {})
    config = tiny_config("inline", cluster=given, **sections)
    return await start_backend(
        config,
        model_path=model_path,
        run_dir=Path("run"),
        total_optimizer_steps=1,
        warm=warm,
        tell=cluster.calls.append,
    )


@pytest.mark.parametrize(
    ("hangs", "said"),
    [
        ({"rollout-0.up"}, "rollout-0 to start"),
        ({"actor-0.build"}, "actor-0 to load"),
        ({"actor-0.outbox.connect", "rollout-0.inbox.connect"}, "rollout-0 to meet actor-0"),
        ({"rollout-0.serve"}, "rollout-0 to start its engine"),
    ],
)
def test_a_start_that_takes_too_long_says_who_was_waited_for_and_ends_everything(
    hangs: set[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = PlannedCluster(frozenset(hangs))
    with pytest.raises(StallError, match=rf"start_timeout_s = 600 s: .*waited for {said}"):
        run_virtual(start(cluster, monkeypatch, timeout_s=600))
    assert set(cluster.log) == {"reserved", *EVERYTHING_ENDED}
    assert cluster.log[-1] == "stopped", "workers end before the cluster does"


def test_workers_start_while_the_model_is_warmed_up_for_which_no_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = PlannedCluster()

    async def warm_up() -> None:
        await asyncio.sleep(1000)
        cluster.calls.append("warm")

    async def both() -> None:
        await start(cluster, monkeypatch, timeout_s=600, warm=warm_up())

    run_virtual(both())
    warm = cluster.calls.index("warm")
    assert {f"{name} up" for name in ("actor-0", "rollout-0", "episode-worker-0")} <= set(cluster.calls[:warm])
    assert {f"{name} build" for name in ("actor-0", "rollout-0", "episode-worker-0")} <= set(cluster.calls[warm:])
    assert cluster.calls[-1] == "the models are loaded"


def test_what_is_left_of_the_limit_counts_again_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StallError, match=r"start_timeout_s = 600 s: .*waited for actor-0 to load"):
        run_virtual(start(PlannedCluster(frozenset({"actor-0.build"})), monkeypatch, 600, warm=asyncio.sleep(1000)))


async def test_a_start_says_who_is_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cluster, told = PlannedCluster(), list[str]()
    cluster.separate_processes, cluster.address = True, "127.0.0.1"
    async with AsyncExitStack() as stack:
        beginning = startup.Startup(
            tiny_config("ray"),
            cluster,
            stack,
            model_path="m",
            total_optimizer_steps=1,
            run_dir=tmp_path,
            tell=told.append,
        )
        await beginning.launch()
    assert told == [
        "Ray is up",
        "actor-0 is up, 1 of 3",
        "rollout-0 is up, 2 of 3",
        "episode-worker-0 is up, 3 of 3",
    ]


@pytest.mark.parametrize(
    ("parallel", "lost", "left", "copies"),
    [({}, 1, 3, 1), ({"tp": 2}, 0, 2, 1), ({"replicate": 2}, 3, 2, 1)],
)
def test_ranks_without_a_place_are_left_out_and_looked_for_again(
    parallel: dict[str, int], lost: int, left: int, copies: int, tmp_path: Path
) -> None:
    async def restarted_twice() -> list[list[WorkerSpec]]:
        cluster, nowhere = PlannedCluster(), [f"actor-{lost}"]

        async def find_place(spec: WorkerSpec, others: Sequence[int] = ()) -> int:
            return await asyncio.Event().wait() if spec.name in nowhere else spec.device

        cluster.find_place = find_place
        config = tiny_config("ray", trainer={"n_gpus_per_node": 4}, actor={"parallel": parallel})
        found = []
        async with AsyncExitStack() as stack:
            begun = startup.Startup(config, cluster, stack, model_path="m", total_optimizer_steps=1, run_dir=tmp_path)
            await begun.launch()
            for _ in range(2):
                cluster.launched.clear()
                await begun._replace_ranks("actor", StartWaits())
                assert len(begun._groups["actor"].workers) == len(cluster.launched)
                found.append([*cluster.launched])
                nowhere.clear()  # a machine has come
        return found

    fewer, all_again = run_virtual(restarted_twice())
    for specs, count, of_model in ((fewer, left, copies), (all_again, 4, parallel.get("replicate", 1))):
        assert [(spec.arguments["rank"], spec.arguments["world_size"]) for spec in specs] == [
            (rank, count) for rank in range(count)
        ]
        assert {spec.arguments["config"].actor.parallel.replicate for spec in specs} == {of_model}
    assert f"actor-{lost}" not in {spec.name.partition("+")[0] for spec in fewer}


SEVEN_BILLION = (
    '{"model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28, '
    '"num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": false}'
)
"""Each of three ranks takes 53 GB of a GPU for it, or 93 of a CPU's memory; a tenth of what is there is left alone."""


@pytest.mark.parametrize(
    ("free_gb", "gpu_gb", "on", "fits"),
    [
        (60, 80, "aaa", True),
        (55, 80, "abc", False),
        (105, None, "abc", True),
        (105, None, "aab", False),
        (210, None, "aab", True),
    ],
)
def test_fewer_ranks_go_on_only_where_their_devices_have_room_and_else_wait_for_a_machine(
    free_gb: int, gpu_gb: int | None, on: str, fits: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(SEVEN_BILLION)
    machines = dict(zip(("actor-0", "actor-1", "actor-2"), on, strict=True))
    nowhere = ["actor-3"]

    class Machines(PlannedCluster):
        async def answer(self, name: str, method: str) -> Any:
            if method == "memory":
                whole = gpu_gb and gpu_gb * 10**9
                return machines[name.partition("+")[0]], whole, free_gb * 10**9
            return await super().answer(name, method)

        async def find_place(self, spec: WorkerSpec, others: Sequence[int] = ()) -> int:
            return await asyncio.Event().wait() if spec.name in nowhere else spec.device

    async def restarted(until: float) -> list[str]:
        cluster = Machines()
        config = tiny_config("ray", trainer={"n_gpus_per_node": 4}, cluster={"start_timeout_s": 600})
        async with AsyncExitStack() as stack:
            begun = startup.Startup(
                config, cluster, stack, model_path=str(tmp_path), total_optimizer_steps=1, run_dir=tmp_path
            )
            await begun.launch()
            cluster.calls.clear()
            asyncio.get_running_loop().call_later(until, nowhere.clear)
            begun._paths = SimpleNamespace(trainer_restarted=lambda store: None)
            await begun._restartable()["actor"].restart()
        return [call.partition("+")[0] for call in cluster.calls if call.endswith(" build")]

    def names(count: int) -> list[str]:
        return [f"actor-{rank}" for rank in range(count)]

    assert run_virtual(restarted(400)) == names(3 if fits else 4)
    nowhere.append("actor-3")
    if not fits:
        with pytest.raises(
            StallError,
            match=r"waited for a machine .*actor-3: .*\b3 ranks .*"
            r"\d+\.\d GB .*actor-\d\+1 on [abc] has \d+\.\d to spare",
        ):
            run_virtual(restarted(2000))


async def test_a_machine_on_which_a_restarted_rank_does_not_see_the_runs_files_gets_none_again(tmp_path: Path) -> None:
    class Files:
        async def check_rank(self, worker: Any) -> None:
            if worker.name == "actor-1+1":
                raise ConfigError("run.dir=/runs/one is not one directory for all that need it")

    async def find_place(spec: WorkerSpec, others: Sequence[int] = ()) -> int:
        return spec.device

    cluster, avoided = PlannedCluster(), list[str]()
    cluster.find_place, cluster.avoid = find_place, lambda spec: avoided.append(spec.name)
    config = tiny_config("ray", trainer={"n_gpus_per_node": 2})
    async with AsyncExitStack() as stack:
        begun = startup.Startup(config, cluster, stack, model_path="m", total_optimizer_steps=1, run_dir=tmp_path)
        await begun.launch()
        begun._files = Files()
        with pytest.raises(RunError, match=r"not one directory .*not started"):
            await begun._replace_ranks("actor", StartWaits())
        assert avoided == ["actor-1"]
        await begun._replace_ranks("actor", StartWaits())


class Asked(PlannedCluster):
    """Notes what workers are asked for, and finds a place for each where it was."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    async def answer(self, name: str, method: str) -> Any:
        self.asked.append(f"{name} {method}")
        return np.zeros(2, np.float32) if method.endswith("probe") else await super().answer(name, method)

    async def find_place(self, spec: WorkerSpec, others: Sequence[int] = ()) -> int:
        return spec.device


class Seen:
    """Files that every machine sees; notes who was asked for them."""

    def __init__(self) -> None:
        self.by: list[tuple[str, bool]] = []

    async def check_rank(self, worker: Any) -> None: ...

    async def check_later(self, worker: Any, *, receives: bool) -> None:
        self.by.append((worker.name, receives))


async def everything(cluster: Asked, stack: AsyncExitStack, tmp_path: Path) -> tuple[backend.Workers, Seen]:
    """All workers of a run with log-probs on ranks of their own; what they were asked for so far is forgotten."""
    logp = {"logp": {"nnodes": 1, "n_gpus_per_node": 1}, "async_training": {"use_rollout_log_probs": False}}
    begun = startup.Startup(
        tiny_config("ray", **logp), cluster, stack, model_path="m", total_optimizer_steps=1, run_dir=tmp_path
    )
    await begun.launch()
    workers = await begun.run()
    cluster.asked.clear()
    begun._files = seen = Seen()
    return workers, seen


@pytest.mark.parametrize(
    ("role", "prepared"),
    [("actor", ["layout", "open_route"]), ("logp", ["memory_domain", "serve"])],
)
async def test_ranks_that_were_started_again_are_prepared_for_updates(
    role: str, prepared: list[str], tmp_path: Path
) -> None:
    cluster = Asked()
    async with AsyncExitStack() as stack:
        workers, _ = await everything(cluster, stack, tmp_path)
        await workers.restartable[role].restart()
    assert cluster.asked == [f"{role}-0+1 {method}" for method in ("up", "open_store", "build", *prepared)]


async def test_what_takes_a_lost_ones_place_sees_the_files_and_a_replicas_rounding_is_measured(tmp_path: Path) -> None:
    cluster = Asked()
    async with AsyncExitStack() as stack:
        workers, seen = await everything(cluster, stack, tmp_path)
        assert workers.replace_replica is not None
        await workers.replace_replica("rollout-0")
        assert "probe" in cluster.asked[-1]
    assert seen.by == [("rollout-0+1", True)]


async def test_the_first_worker_that_fails_ends_the_start_and_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = PlannedCluster(frozenset({"actor-0.build"}), {"rollout-0.build": ModelError("m: no such folder")})
    with pytest.raises(ModelError, match="m: no such folder"):
        await start(cluster, monkeypatch)
    assert set(cluster.log) == {"reserved", *EVERYTHING_ENDED}


async def test_a_wait_that_runs_out_during_a_start_is_told_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = PlannedCluster(failures={"actor-0.outbox.connect": StallError("actor-0 waited for rollout-0")})
    with pytest.raises(StallError, match=r"^actor-0 waited for rollout-0$"):
        await start(cluster, monkeypatch)


async def test_watching_raises_when_a_worker_dies_that_is_needed_and_replicas_tell_of_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = await start(PlannedCluster(), monkeypatch)
    assert [worker.name for worker in workers.living()] == ["actor-0", "episode-worker-0", "rollout-0"]
    async with asyncio.timeout(60):
        with pytest.raises(WorkerDied, match="worker actor-0 died"):
            await workers.watch()
        with pytest.raises(WorkerDied, match="worker rollout-0 died"):
            await workers.rollouts[0].died()


@pytest.mark.parametrize(
    ("config", "width"),
    [
        ('{"hidden_size": 64}', 64),
        ('{"n_embd": 48}', 48),
        ('{"hidden_size": 7, "text_config": {"hidden_size": 96}}', 96),
        ('{"text_config": null}', None),
        (None, None),
    ],
)
def test_samples_are_balanced_by_the_width_that_the_models_configuration_tells(
    tmp_path: Path, config: str | None, width: int | None
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert hidden_size(str(tmp_path)) == width
    assert hidden_size("owner/model") is None


async def test_an_engine_that_cannot_sleep_cannot_share_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = PlannedCluster()
    with pytest.raises(ConfigError, match=r"cluster\.placement=shared: .*rollout-0\b"):
        await start(cluster, monkeypatch, shared=True)
    assert set(cluster.log) == {"reserved", "actor-0 killed", "episode-worker-0 killed", "stopped"}


async def test_workers_get_a_models_folder_as_an_absolute_path_and_a_name_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for given, expected in (("runs", str(tmp_path / "runs")), ("owner/name", "owner/name")):
        cluster = PlannedCluster()
        await start(cluster, monkeypatch, model_path=given)
        assert {spec.arguments["model_path"] for spec in cluster.launched} == {expected}


async def test_workers_get_the_users_own_functions_by_absolute_paths_and_names_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for loss, advantage, expected in (
        ("my.py:loss", "../a.py:mine", (f"{tmp_path}/my.py:loss", f"{tmp_path.parent}/a.py:mine")),
        ("ppo_clip", "grpo", ("ppo_clip", "grpo")),
    ):
        cluster = PlannedCluster()
        algorithm = {"policy_loss": {"loss_mode": loss}, "adv_estimator": advantage}
        await start(cluster, monkeypatch, algorithm=algorithm)
        given = [spec.arguments["config"].algorithm for spec in cluster.launched]
        assert {(a.policy_loss.loss_mode, a.adv_estimator) for a in given} == {expected}


async def test_an_engine_that_cannot_do_what_is_asked_of_it_on_an_update_ends_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = PlannedCluster()
    cluster.on_update = frozenset({OnUpdate.DRAIN, OnUpdate.KEEP})
    with pytest.raises(ConfigError, match=r"on_update=interrupt: .*rollout-0 .*drain or keep\b"):
        await start(cluster, monkeypatch, async_training={"on_update": "interrupt"})
    assert set(cluster.log) == {"reserved", *EVERYTHING_ENDED}


async def test_closing_twice_ends_everything_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = PlannedCluster()
    workers = await start(cluster, monkeypatch)
    assert cluster.log == ["reserved"]
    await workers.close()
    await workers.close()
    assert sorted(cluster.log) == sorted(["reserved", *EVERYTHING_ENDED])


async def test_what_a_killed_run_left_in_memory_is_removed_by_the_next_run_whatever_that_uses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(startup, "SHARED_MEMORY", tmp_path)
    left = tmp_path / "headway-run-killed"
    left.mkdir()
    workers = await start(PlannedCluster(), monkeypatch)
    await workers.close()
    assert not left.is_dir()
