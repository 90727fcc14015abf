"""An environment of `verifiers` (0.4: a taskset, and harnesses that play its tasks), unmodified, as an agent.

    python verifiers_agent.py '{taskset: {id: letters}}' > tasks.jsonl

    headway train CONFIG … data.train=tasks.jsonl reward.function=program \
        agent.client=verifiers_agent.py:run 'agent.params.env={taskset: {id: letters}}'

``env`` is what verifiers' own configuration files have under ``[env]``. Its training client makes the token ids of each
turn from the policy's tokenizer, and asks for the answer by them; what the engine sampled is what is trained.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

import verifiers.v1 as vf
import yaml

_numbers = itertools.count()


async def run(
    row: Mapping[str, Any],
    base_url: str,
    api_key: str,
    model: str,
    tokenizer: str,
    env: Mapping[str, Any],
    renderer: Mapping[str, Any] | None = None,
    sampling: Mapping[str, Any] | None = None,
) -> float:
    """Play the task of ``row``. Returns the reward that its rubric gives; of several rollouts, the mean.

    Args:
        row: with the column ``task``, as `tasks` makes it.
        env: the environment, as under ``[env]`` in verifiers' configuration files. Harnesses run on this machine unless
            it says otherwise.
        renderer: how messages become token ids and answers become messages, such as ``{name: qwen3}``. Default: by the
            tokenizer's name, else its chat template, which reads no tool calls.
        sampling: sampling of each turn, such as ``{max_tokens: 512}``; temperatures are the run's.

    Raises:
        RuntimeError: a rollout has failed; or one that is not to be trained asks the policy.
    """
    environment = load(env)
    task_type = type(environment.taskset).task_type()
    task = task_type(task_type.data_type().model_validate_json(row["task"]), environment.config.taskset.task)
    key = f"HEADWAY_{next(_numbers)}_API_KEY"  # verifiers reads keys from variables; programs do not inherit this one
    client = vf.TrainClientConfig.model_validate(
        {"base_url": base_url, "api_key_var": key, "renderer_model_name": tokenizer, "renderer": renderer}
    )
    os.environ[key] = api_key
    try:
        async with environment.serving():
            context = vf.ModelContext(model, client, vf.Sampling.model_validate(sampling or {}))
            episode = await environment.run_episode(task, context)
    finally:
        del os.environ[key]
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors))
    own = [trace for trace in episode.traces if trace.agent.config.client == client]
    if untrained := [trace.agent.name for trace in own if not trace.agent.trainable]:
        raise RuntimeError(
            f"{', '.join(untrained)}: not to be trained, and asks the policy; give it a client of its own"
        )
    return fmean(trace.reward for trace in own)


def load(env: Mapping[str, Any]) -> vf.Env[Any]:
    """Make the environment. Its agents' harnesses run as processes of this machine where nothing else is said."""
    raw = {**env}
    kind = vf.env_config_type(raw.get("taskset", {}).get("id", ""), raw.get("id", ""))
    for name, field in kind.model_fields.items():
        if isinstance(field.default, vf.AgentConfig) and "runtime" not in field.default.model_fields_set:
            raw[name] = {"runtime": {"type": "subprocess"}, **raw.get(name, {})}
    return vf.load_environment(vf.resolve_env_config(raw))


def tasks(env: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Make a row of each task: its prompt, for lengths and reports, and all of it as JSON."""
    for task in load(env).taskset:
        system = [{"role": "system", "content": task.data.system_prompt}] if task.data.system_prompt else []
        prompt = task.data.prompt_text or f"task {task.data.idx}"
        data = task.data.model_dump_json(exclude_defaults=True)
        yield {"prompt": [*system, {"role": "user", "content": prompt}], "answer": "", "task": data}


if __name__ == "__main__":
    for one in tasks(yaml.safe_load(sys.argv[1])):
        print(json.dumps(one))
