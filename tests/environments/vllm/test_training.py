"""A short run over vLLM, as a user starts it: generation, rewards, training, and updates in mid-sequence."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from headway.config.sections.model_section import MakeModelConfig
from headway.models.made_model import make_model
from tests.integration.support import events, finish, make_job, start, summary

WAIT_S = 280
"""vLLM's processes take half a minute to start, and much more on a busy machine."""

REWARD = '''
def score(response, answer):
    """What a model learns within a minute: letters of the first half of the alphabet."""
    return sum(c < "n" for c in response) / (1 + len(response))
'''


def test_async_partial_trains_over_vllm(tmp_path: Path) -> None:
    """Over 5 s: a whole run, with a start of vLLM."""
    recipe = make_job(tmp_path)
    # Attention on CPUs takes heads of 32 and more.
    model = MakeModelConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=32, intermediate_size=64
    )
    make_model(model, 0, tmp_path / "wide")
    (tmp_path / "letters.py").write_text(REWARD)
    overrides = (
        "mode=async_partial",
        f"run.dir={tmp_path / 'run'}",
        "cluster.backend=inline",
        "cluster.start_timeout_s=240",
        "rollout.name=vllm",
        "rollout.kv_cache_gib=0.1",
        "rollout.total_rollout_steps=128",
        "actor.optim.lr=1.0e-2",
        f"reward.function={tmp_path / 'letters.py'}:score",
        f"model.path={tmp_path / 'wide'}",
    )
    code, output = finish(start("-m", "headway", "train", str(recipe), *overrides), timeout_s=WAIT_S)
    assert code == 0, output
    result = summary(tmp_path / "run")
    groups, lag = result["groups"], result["lag"]
    assert groups["trained"] == 128
    assert groups["admitted"] == sum(groups[fate] for fate in groups if fate != "admitted")
    assert result["balanced"]
    assert lag["max"] <= lag["bound"]
    assert result["version"] == 8
    loads = [phase for phase in events(tmp_path / "run", "update.phase") if phase["phase"] == "load"]
    assert [load["version"] for load in loads] == list(range(1, 9))
    # The probe: what vLLM serves is what the trainer has.
    assert all(load["probe_difference"] < 1e-4 for load in loads)
    # Of 16 groups of 4 each: a run that learns nothing differs by less than 0.05.
    rewards = {event["number"]: fmean(event["rewards"]) for event in events(tmp_path / "run", "group.rewarded")}
    first, last = (fmean(rewards[number] for number in numbers) for numbers in (range(16), range(112, 128)))
    assert last > first + 0.1, (first, last)
