"""Short runs on machines of namespaces, as a user starts them, and what is asked of every one that ended."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks.nodes.machines import RAY, Machines
from headway.config.sections.model_section import MakeModelConfig
from headway.models.made_model import make_model, make_tokenizer

RUN_S = 300.0
"""For one run, on a machine on which others compute, too."""
RECIPE = "/tmp/shared/quick.yaml"
REWARD = '''
def score(response, answer):
    """Denser than exactness, so that steps of an untrained model change its weights."""
    return sum(c in answer for c in response) / (1 + len(response))
'''
QUICK: dict[str, Any] = {
    "model": {"path": "/tmp/shared/model"},
    "data": {
        "task": {"name": "sort", "params": {"mean_length": 4, "max_length": 8}, "val_size": 8},
        "max_prompt_length": 16,
        "max_response_length": 16,
    },
    "reward": {"function": "/tmp/shared/reward.py:score"},
    "rollout": {"n": 2, "total_rollout_steps": 32, "test_freq": -1, "max_concurrent": 4, "threads": 1},
    "actor": {"ppo_mini_batch_size": 4, "ppo_max_token_len_per_gpu": 1024, "optim": {"lr": 1.0e-3}},
    "trainer": {"threads": 1},
    "cluster": {"device": "cpu", "address": RAY, "start_timeout_s": RUN_S},
    "reports": {"live": "off", "trackers": []},
}
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,  # vLLM on CPUs takes no less
}
ROUNDING = 1e-4
"""Nats between log-probs of trainer and replica that have the same float32 weights."""


def with_room(three: Machines, left: float) -> Iterator[Machines]:
    three.fill(left)
    yield three
    three.empty()


def prepare(shared: Path) -> None:
    """Write what runs need into the folder that machines share."""
    model = MakeModelConfig(**SIZES, intermediate_size=64)
    make_model(model, 0, shared / "model")
    make_experts(model, shared / "experts")
    (shared / "reward.py").write_text(REWARD)
    (shared / "quick.yaml").write_text(yaml.safe_dump(QUICK))


def make_experts(like: MakeModelConfig, folder: Path) -> None:
    """Write a mixture of four experts with the tokenizer of ``like``."""
    tokenizer = make_tokenizer(like)
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    config = Qwen3MoeConfig(
        **SIZES, **experts, vocab_size=len(tokenizer), pad_token_id=0, bos_token_id=None, eos_token_id=1
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train(three: Machines, run: str, *settings: str) -> Path:
    """Run ``headway train`` on A to its end, which must be a good one and leave no tokens on a machine; returns its
    directory, seen from outside.
    """
    ran = three["A"].run("headway", "train", RECIPE, f"run.dir=/tmp/shared/{run}", *settings, timeout_s=RUN_S)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    check_no_tokens(three)
    return three.shared / run


def check_no_tokens(three: Machines) -> None:
    """No tokens are left on a machine, those of killed runs included."""
    for name, machine in three.by_name.items():
        assert "headway-run-" not in machine.run("ls", "/dev/shm").stdout, f"machine {name}"


def refused(three: Machines, *settings: str, **variables: str) -> str:
    """Run ``headway train`` on A, which must be refused before anything is trained. Returns what it says."""
    ran: subprocess.CompletedProcess[str] = three["A"].run(
        "headway", "train", RECIPE, *settings, timeout_s=RUN_S, **variables
    )
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert "training starts" not in ran.stdout
    assert ran.stderr.count("error:") == 1, ran.stderr
    return ran.stderr


def check_ledgers(run: Path, trained: int) -> dict[str, Any]:
    """Groups and episodes have one fate each, and the bound on lag holds. Returns the summary."""
    told: dict[str, Any] = json.loads((run / "summary.json").read_text())
    for counts in (told["groups"], told["episodes"]):
        assert counts["admitted"] == sum(count for fate, count in counts.items() if fate != "admitted")
    assert (told["status"], told["balanced"], told["groups"]["trained"]) == ("completed", True, trained)
    assert told["lag"]["max"] <= told["lag"]["bound"]
    return told


def check(run: Path) -> None:
    """Ledgers balance, steps changed the weights, and each replica loaded each version and serves what is trained."""
    told = check_ledgers(run, QUICK["rollout"]["total_rollout_steps"])
    assert any(step["metrics"]["grad_norm"] > 0 for step in events(run, "optimizer.stepped"))
    (started,) = events(run, "run.started")
    loads = [phase for phase in events(run, "update.phase") if phase["phase"] == "load"]
    for version in range(1, told["version"] + 1):
        assert {load["where"] for load in loads if load["version"] == version} == set(started["slots"])
    assert all((load["probe_difference"] or 0.0) < ROUNDING for load in loads)
    assert any(load["probe_difference"] is not None for load in loads)


def hosts(run: Path) -> dict[str, str]:
    """The machine of each worker that computes."""
    return {event["worker"]: event["host"] for event in events(run, "worker.described")}


def events(run: Path, *kinds: str) -> list[dict[str, Any]]:
    """What a run has written by now, of these kinds."""
    file = run / "events.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in found if event["kind"] in kinds]
