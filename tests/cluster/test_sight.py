"""What the machines of a run see, over workers whose paths are those of machines of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from headway.cluster.roles.role import FileProbe
from headway.cluster.shared_filesystem import SharedFilesystem
from headway.cluster.worker_group import Worker
from headway.cluster.worker_plan import ClusterPlan, Rank
from headway.config.schema import Config
from headway.errors import ConfigError, ModelError

RUN, MODEL, WEIGHTS = Path("/runs/one"), "/models/tiny", Path("/weights")
HERE, THERE = "10.0.0.1", "10.0.0.2"


class Machine(FileProbe):
    """Absolute paths lie below ``root``."""

    def __init__(self, root: Path, host: str) -> None:
        super().__init__(host)
        self._root = root
        for folder in (RUN, Path(MODEL)):
            self.at(folder).mkdir(parents=True)
        self.has("config.json", "{}")

    def has(self, name: str, text: str) -> None:
        """A file of the model's."""
        (self.at(Path(MODEL)) / name).write_text(text)

    def at(self, path: Path) -> Path:
        return self._root / path.relative_to("/")

    async def place(self) -> str:
        return f"node-{self._host[-1]} ({self._host})"

    async def leave_mark(self, mark: Path, text: str, make_directory: bool = False) -> str | None:
        return await super().leave_mark(self.at(mark), text, make_directory)

    async def text_of(self, file: Path) -> str | None:
        return await super().text_of(self.at(file))

    async def remove_mark(self, mark: Path) -> None:
        await super().remove_mark(self.at(mark))

    async def model_files(self, path: str) -> dict[str, str] | None:
        return await super().model_files(str(self.at(Path(path)))) if path.startswith("/") else None


class Looking:
    """A worker that can do nothing but look."""

    def __init__(self, name: str, on: Machine) -> None:
        self.name = name
        self._lookout = on

    async def call(self, method: str, *args: Any) -> Any:
        part, name = method.split(".")
        assert part == "lookout"
        return await getattr(self._lookout, name)(*args)


@pytest.fixture
def here(tmp_path: Path) -> Machine:
    """The driver's machine."""
    return Machine(tmp_path / "here", HERE)


@pytest.fixture
def there(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "there", THERE)


def look(
    driver: Machine, workers: Mapping[str, Machine], transport: str = "broadcast", model_path: str = MODEL
) -> Coroutine[Any, Any, None]:
    ranks = {
        role: [Rank(name, name) for name in workers if name.startswith(role)]
        for role in ("actor", "rollout", "ref", "logp", "critic")
    }
    plan = ClusterPlan(workers=(), ranks=ranks, on_trainer_ranks=frozenset(), shared=False, shares=())
    directory = WEIGHTS if transport in ("disk", "shared_memory") else None
    config = Config.model_validate({"param_update": {"transport": transport}})
    sight = SharedFilesystem(config, RUN, model_path, directory, driver)
    return sight.check(plan, {name: cast(Worker, Looking(name, on)) for name, on in workers.items()})


async def test_one_machine_sees_all_and_no_mark_stays(here: Machine) -> None:
    here.at(WEIGHTS).mkdir()
    await look(here, {"actor-0": here, "actor-1": here, "rollout-0": here}, "shared_memory")
    assert list(here.at(RUN).iterdir()) == list(here.at(WEIGHTS).iterdir()) == []


async def test_replicas_need_not_see_the_runs_directory(here: Machine, there: Machine) -> None:
    await look(here, {"actor-0": here, "rollout-0": there})


@pytest.mark.parametrize("writer", ["actor-1", "critic-0", "ref-0", "logp-0"])
async def test_a_rank_that_does_not_see_the_runs_directory_is_named_with_its_machine(
    writer: str, here: Machine, there: Machine
) -> None:
    with pytest.raises(ConfigError) as raised:
        await look(here, {"actor-0": here, writer: there, "rollout-0": here})
    message = str(raised.value)
    assert f"the driver, on node-1 ({HERE}), sees it; but not {writer} on node-2 ({THERE})" in message
    assert "Set run.dir to a path on a file system that these machines share" in message
    assert list(here.at(RUN).iterdir()) == list(there.at(RUN).iterdir()) == []


async def test_a_rank_that_is_started_again_on_a_machine_without_the_runs_directory_is_named(
    here: Machine, there: Machine
) -> None:
    (here.at(RUN) / "config.yaml").write_text("of this run")
    (there.at(RUN) / "config.yaml").write_text("of another one")
    here.at(RUN).chmod(0o500)
    sight = SharedFilesystem(Config(), RUN, MODEL, None, here)
    await sight.check_rank(cast(Worker, Looking("actor-0+1", here)))
    with pytest.raises(ConfigError, match=rf"not actor-0\+1 on node-2 \({THERE}\)"):
        await sight.check_rank(cast(Worker, Looking("actor-0+1", there)))


async def test_a_directory_that_a_rank_can_read_and_not_write_is_refused(
    here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(mark: Path, text: str, make_directory: bool = False) -> str:
        return "Read-only file system"

    rank = Machine(here.at(Path("/other")), THERE)
    monkeypatch.setattr(rank, "_root", here._root)  # it sees the same files
    monkeypatch.setattr(rank, "leave_mark", refuse)
    with pytest.raises(ConfigError, match=r"not actor-0 on node-2 .*can write"):
        await look(here, {"actor-0": rank, "rollout-0": here})


async def test_workers_without_the_models_folder_are_named_with_their_machine(here: Machine, there: Machine) -> None:
    (there.at(Path(MODEL)) / "config.json").unlink()
    there.at(Path(MODEL)).rmdir()
    with pytest.raises(ModelError) as raised:
        await look(here, {"actor-0": here, "rollout-0": there, "rollout-1": there})
    assert str(raised.value) == (
        f"{MODEL}: no such folder for rollout-0 and rollout-1 on node-2 ({THERE}); the driver, on node-1 ({HERE}), has "
        "it. Copy the folder to the same path there, or give a path on a file system that these machines share"
    )


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("config.json", '{"a": 1}', "config.json is missing"),
        ("model.safetensors", "w", "model.safetensors is missing"),
    ],
)
async def test_another_model_at_the_same_path_is_told(
    name: str, text: str, said: str, here: Machine, there: Machine
) -> None:
    there.has(name, text)
    with pytest.raises(ModelError, match=rf"rollout-0 on node-2 .*another model .*driver .*: {said}"):
        await look(here, {"actor-0": here, "rollout-0": there})


async def test_a_name_on_the_hub_is_each_machines_own_to_find(here: Machine, there: Machine) -> None:
    await look(here, {"actor-0": here, "rollout-0": there}, model_path="owner/name")


async def test_shared_memory_between_machines_is_refused_with_who_is_where(here: Machine, there: Machine) -> None:
    here.at(WEIGHTS).mkdir()
    with pytest.raises(ConfigError) as raised:
        await look(here, {"actor-0": here, "rollout-0": there}, "shared_memory")
    assert str(raised.value) == (
        "param_update.transport=shared_memory works within one machine, and this run is on several: the driver on "
        f"node-1 ({HERE}), actor-0 on node-1 ({HERE}), rollout-0 on node-2 ({THERE}). Set param_update.transport to "
        "broadcast or object_store"
    )


@pytest.mark.parametrize("receiver", ["rollout-0", "logp-0"])
async def test_a_directory_of_weights_that_a_receiver_does_not_see_is_refused(
    receiver: str, here: Machine, there: Machine
) -> None:
    there.at(WEIGHTS).mkdir()
    there.at(RUN).rmdir()
    there.at(RUN).symlink_to(here.at(RUN))  # ranks of logp see the run's directory
    with pytest.raises(ConfigError, match=rf"disk: /weights, .*actor-0 on node-1 .*{receiver} on node-2"):
        await look(here, {"actor-0": here, receiver: there, "rollout-1": here}, "disk")


async def test_a_replica_that_came_later_is_looked_at_alone(here: Machine, there: Machine) -> None:
    sight = SharedFilesystem(Config(), RUN, MODEL, None, here)
    await asyncio.wait_for(sight.check_later(cast(Worker, Looking("rollout-0+1", there)), receives=True), 60)
    there.has("config.json", "[]")
    with pytest.raises(ModelError, match=r"rollout-0\+1 on node-2"):
        await sight.check_later(cast(Worker, Looking("rollout-0+1", there)), receives=True)
