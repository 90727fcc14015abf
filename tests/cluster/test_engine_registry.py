"""What a replica's engine is started with on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from headway.cluster.roles.rollout_role import ReplicaSpec, start_native, start_vllm
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

    monkeypatch.setattr("headway.engines.rollout.vllm.engine.VllmEngine", Engine)

    async def start(**sections: Any) -> dict[str, Any]:
        config = Config.model_validate({"model": {"path": str(tmp_path)}, **sections})
        await start_vllm(
            ReplicaSpec(config, str(tmp_path), "rollout-0", "cuda:0", str, "bfloat16", print, None, lambda: 0.0)
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


async def test_vllm_in_the_trainers_process_leaves_it_its_part_of_their_gpu(options: Any) -> None:
    offload = {"fsdp_config": {"param_offload": True}}
    got = await options(cluster={"backend": "inline"}, actor=offload, rollout={"n_gpus_per_node": 2})
    assert got["gpu_memory_utilization"] == pytest.approx(0.45)


async def test_a_replica_without_room_beside_the_trainer_is_refused(options: Any) -> None:
    with pytest.raises(ConfigError, match=r"training rank .*121\.8"):
        await options(**{**SHARED, "trainer": {"n_gpus_per_node": 1}})


GB, P = 10**9, 7.6156e9
BIG = {"rollout": {"max_concurrent": 128}, "data": {"max_prompt_length": 2048, "max_response_length": 8192}}
ASKED = 128 * 10_240 * 2 * 28 * 4 * 128 * 2
"""Bytes of keys and values of 128 whole contexts of `SHAPE` in bfloat16."""


@pytest.fixture
def cache_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that starts a replica of the native engine on a GPU of 80 GB, and returns the bytes for its cache.

    ``others``: bytes that other processes hold there; ``held``: this one, beside the served weights.
    """
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))

    async def start(others: float = 0, held: float = 0, receive: Any = print, **sections: Any) -> int:
        got: dict[str, Any] = {}
        there = held
        config = Config.model_validate({"model": {"path": str(tmp_path)}, **BIG, **sections})

        class Model:
            def to(self, device: str) -> Model:
                nonlocal there
                there += 2 * P
                return self

        monkeypatch.setattr(Cuda, "memory_listed", lambda self: 80 * GB)
        monkeypatch.setattr(Cuda, "allocated_memory", lambda self, device: int(there))
        monkeypatch.setattr(Cuda, "free_memory", lambda self, device: int(80 * GB - others - there))
        monkeypatch.setattr("headway.models.pretrained.load_model", lambda *_, **__: Model())
        monkeypatch.setattr(
            "headway.engines.rollout.native.engine.NativeEngine", lambda model, **arguments: got.update(arguments)
        )
        spec = ReplicaSpec(config, str(tmp_path), "rollout-0", "cuda:0", str, "bfloat16", receive, None, lambda: 0.0)
        await start_native(spec)
        return int(got["kv_cache_bytes"])

    return start


async def test_the_native_engine_takes_what_a_gpu_has_room_for_and_not_a_context_for_each_slot(
    cache_bytes: Any,
) -> None:
    assert ASKED > 75 * GB
    alone = await cache_bytes(cluster={"placement": "split"})
    assert 30 * GB < alone < 72 * GB - 2 * P, "beside its weights, and a tenth for libraries"
    beside = await cache_bytes(others=30 * GB, cluster={"placement": "split"})
    assert alone - 27 * GB - GB < beside < alone - 25 * GB, "memory that others hold is not there"
    with pytest.raises(ConfigError, match=r"GPU has 0\.8 GB left.*other processes"):
        await cache_bytes(others=64 * GB, cluster={"placement": "split"})


async def test_what_the_trainer_has_on_a_shared_gpu_already_is_not_counted_twice(cache_bytes: Any) -> None:
    before = await cache_bytes(others=20 * GB, **SHARED)
    after = await cache_bytes(others=20 * GB, held=4 * P / 8, **SHARED)
    assert before <= after < before + 0.11 * 4 * P / 8, "but for a tenth, which is left of what is free"


async def test_in_one_process_the_native_engine_leaves_what_the_trainer_on_its_gpu_will_hold(cache_bytes: Any) -> None:
    """The moments, of 8 bytes a parameter, come with the first step."""
    inline = {"cluster": {"backend": "inline"}, "actor": {"fsdp_config": {"param_offload": True}}}
    offloaded = await cache_bytes(**inline)
    assert offloaded > 0
    with pytest.raises(ConfigError, match=r"training rank .*121\.8"):
        await cache_bytes(cluster={"backend": "inline"})
    halves = await cache_bytes(**inline, rollout={**BIG["rollout"], "n_gpus_per_node": 2})
    assert 0 < halves < offloaded / 2
    assert await cache_bytes(receive=None, cluster={"backend": "inline"}) == offloaded, "an evaluation has no trainer"


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
