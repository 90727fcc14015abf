"""A short run over vLLM, as a user starts it: generation, rewards, training, and updates in mid-sequence."""

from __future__ import annotations

from pathlib import Path

from headway.config.model import MakeModelConfig
from headway.models.make import make_model
from tests.integration.support import events, finish, make_job, start, summary

WAIT_S = 280
"""vLLM's processes take half a minute to start, and much more on a busy machine."""


def test_async_partial_trains_over_vllm(tmp_path: Path) -> None:
    recipe = make_job(tmp_path)
    # Attention on CPUs takes heads of 32 and more.
    model = MakeModelConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=32, intermediate_size=64
    )
    make_model(model, 0, tmp_path / "wide")
    overrides = (
        "mode=async_partial",
        f"run.dir={tmp_path / 'run'}",
        "cluster.backend=inline",
        "cluster.start_timeout_s=240",
        "rollout.name=vllm",
        "rollout.kv_cache_gib=0.1",
        "rollout.total_rollout_steps=48",
        f"model.path={tmp_path / 'wide'}",
    )
    code, output = finish(start("-m", "headway", "train", str(recipe), *overrides), timeout_s=WAIT_S)
    assert code == 0, output
    result = summary(tmp_path / "run")
    groups, lag = result["groups"], result["lag"]
    assert groups["trained"] == 48
    assert groups["admitted"] == sum(groups[fate] for fate in groups if fate != "admitted")
    assert result["balanced"]
    assert lag["max"] <= lag["bound"]
    assert result["version"] == 3
    loads = [phase for phase in events(tmp_path / "run", "update.phase") if phase["phase"] == "load"]
    assert [load["version"] for load in loads] == [1, 2, 3]
    # The probe: what vLLM serves is what the trainer has.
    assert all(load["probe_difference"] < 1e-4 for load in loads)
