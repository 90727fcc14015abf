"""What a replica's engine is started with on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from headway.cluster.roles.rollout_role import ReplicaSpec, start_vllm
from headway.config.schema import Config
from headway.devices import Cuda
from headway.errors import ConfigError

SHAPE = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that starts vLLM with settings, and returns the arguments that it got of its own."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    monkeypatch.setattr(Cuda, "memory_listed", lambda self: 80 * 10**9)
    got: dict[str, Any] = {}

    class Engine:
        def __init__(self, path: Path, *, options: dict[str, Any], **_: Any) -> None:
            got.update(options)

        async def start(self) -> None: ...

    monkeypatch.setattr("headway.engines.rollout.vllm.VllmEngine", Engine)

    async def start(**sections: Any) -> dict[str, Any]:
        config = Config.model_validate({"model": {"path": str(tmp_path)}, **sections})
        await start_vllm(
            ReplicaSpec(config, str(tmp_path), "rollout-0", "cuda:0", str, "bfloat16", None, None, lambda: 0.0)
        )
        return got

    return start


SHARED = {"cluster": {"placement": "shared"}, "trainer": {"n_gpus_per_node": 8}}


async def test_vllm_on_a_shared_gpu_takes_what_the_trainer_leaves_after_its_first_step(options: Any) -> None:
    """By default it wants 0.92 of the GPU back when it wakes up, and the optimizer has its moments there by then."""
    got = await options(**SHARED)
    assert got["gpu_memory_utilization"] == pytest.approx(0.9 - 16 * 7.6156e9 / 8 / 80e9, abs=1e-3)


async def test_what_the_user_gives_vllm_is_kept(options: Any) -> None:
    got = await options(**SHARED, rollout={"engine_kwargs": {"gpu_memory_utilization": 0.3}})
    assert got["gpu_memory_utilization"] == 0.3


async def test_vllm_on_gpus_of_its_own_chooses_by_itself(options: Any) -> None:
    assert await options(cluster={"placement": "split"}) == {}


async def test_a_replica_without_room_beside_the_trainer_is_refused(options: Any) -> None:
    with pytest.raises(ConfigError, match=r"training rank on it holds 121\.8"):
        await options(**{**SHARED, "trainer": {"n_gpus_per_node": 1}})


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_model_that_is_a_name_on_the_hub_has_no_folder_to_be_read(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def load_config(path: str, **_: Any) -> Any:
        asked.append(path)
        return Qwen2Config(**{name: value for name, value in SHAPE.items() if name != "model_type"})

    monkeypatch.setattr("headway.models.pretrained.load_config", load_config)
    monkeypatch.setattr(Cuda, "memory_listed", lambda self: 80 * 10**9)
    named = Config.model_validate({"model": {"path": "Qwen/Qwen2.5-7B"}, "cluster": {"placement": "split"}})
    room = ReplicaSpec(named, "Qwen/Qwen2.5-7B", "rollout-0", device, str, "bfloat16", None, None, lambda: 0.0).room()
    assert (room is None) == (device == "cpu")
    assert asked == ([] if device == "cpu" else ["Qwen/Qwen2.5-7B"])
