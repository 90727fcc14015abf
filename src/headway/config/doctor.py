"""Checks of a whole configuration: settings that clash or have no effect are refused, all at once, with reasons."""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from math import floor

from headway.config.algorithm_checks import algorithm_problems
from headway.config.layers import lies_in
from headway.config.loading import LoadedConfig, mode_config
from headway.config.presets import preset
from headway.config.schema import Config, Order
from headway.config.sections.agent_section import program_problems, sandbox_notes, sandbox_problems
from headway.config.settings_without_effect import unread_by_sft, without_effect
from headway.config.sizing.placement import (
    ACTOR,
    CRITIC,
    LOGP,
    MOST_SLOTS,
    REF,
    Placement,
    most_in_flight,
    needs_greedy_baseline,
    resolve_placement,
    several_nodes,
)
from headway.config.transport_facts import TRANSPORTS, WITHIN_PROCESS, transport_of
from headway.errors import ConfigError
from headway.runtime.user_code import names_user_code

OF_DEVICES = frozenset(
    {
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "prefill_context_parallel_size",
        "distributed_executor_backend",
    }
)
"""Arguments of vLLM's that say how many devices it takes, and how."""


def diagnose(loaded: LoadedConfig, *, supervised: bool = False) -> list[str]:
    """Return notes on a configuration that can run: those made in loading, and remarks on its combination of settings.

    ``supervised``: it is for ``headway sft``. A file serves that and ``headway train``, so of the settings that
    ``headway sft`` does not read only those that were typed are problems.

    Raises:
        ConfigError: in one message, a line for each problem.
    """
    checks: Sequence[Callable[[Config], Iterator[str]]] = (
        _inputs,
        _model,
        _data,
        _reward,
        _programs,
        _length,
        _sampling,
        algorithm_problems,
        _asynchrony,
        _patience,
        _devices,
        _backend,
        _update,
    )
    if supervised:
        checks = (_conversations, _model, _data, _devices, _backend)
    problems = [problem for check in checks for problem in check(loaded.config)]
    idle = without_effect(loaded.config)
    chosen = loaded.user_keys - loaded.usual_keys
    problems += [
        f"{key} has no effect: {reason}" for key, reason in idle.items() if any(lies_in(one, key) for one in chosen)
    ]
    if supervised:
        problems += unread_by_sft(loaded.typed_keys)
    if problems:
        raise ConfigError("\n".join(problems))
    return loaded.notes if supervised else [*loaded.notes, *_notes(loaded)]


def _inputs(config: Config) -> Iterator[str]:
    if config.model.path is None and config.model.make is None:
        yield "model: give model.path (a Hugging Face folder), or model.make to make a small model"
    if not config.data.train_sources and config.data.task is None:
        yield "data: give data.train (a JSONL, CSV or Parquet file), or data.task for a procedural task"


def _conversations(config: Config) -> Iterator[str]:
    if config.model.path is None:
        yield "model.path: give the Hugging Face folder, or the name on the hub, of the model to fine-tune"
    if not config.data.train_sources:
        yield "data.train: give the conversations to learn from, a .jsonl, .csv or .parquet file"


def _model(config: Config) -> Iterator[str]:
    model, data = config.model, config.data
    if model.path is not None and model.make is not None:
        yield "model: model.path and model.make are both given; set one of them to null"
    if model.warmup is not None and model.make is None:
        yield "model.warmup is for a made model; set it to null, or give model.make"
    demonstrations = None if model.warmup is None else model.warmup.demonstrations
    if model.warmup is not None and demonstrations is None and data.task is None:
        yield (
            "model.warmup trains on data.task, and there is none; set model.warmup to null, give model.path, or give "
            "model.warmup.demonstrations"
        )
    if demonstrations is not None and not names_user_code(demonstrations):
        yield f"model.warmup.demonstrations={demonstrations}: expected file.py:function, such as demonstrations.py:play"
    if model.path is None and model.make is not None and model.make.chat_template is None:
        if demonstrations is not None:
            yield "model.warmup.demonstrations are chat messages; give the made model a model.make.chat_template"
        elif config.agent.has_program:
            yield "programs speak to the model by chat messages; give the made model a model.make.chat_template"
    if model.path is None and model.make is not None:
        length, limit = data.max_prompt_length + data.max_response_length, model.make.max_position_embeddings
        if length > limit:
            yield (
                f"data.max_prompt_length={data.max_prompt_length} + data.max_response_length="
                f"{data.max_response_length} is {length} tokens, more than "
                f"model.make.max_position_embeddings={limit}; lower the lengths or raise the limit"
            )


def _data(config: Config) -> Iterator[str]:
    data = config.data
    if data.train_sources and data.task is not None:
        yield "data: data.train and data.task are both given; set one of them to null"
    weighted = [source.weight is not None for source in data.train_sources]
    if any(weighted) and not all(weighted):
        without = ", ".join(source.label for source in data.train_sources if source.weight is None)
        yield f"data.train: {without} has no weight, and others have; give every source one, or none"
    elif weighted == [True]:
        yield f"data.train: weight has no effect: {data.train_sources[0].label} is the only source; drop it"
    if any(source.weight is not None for source in data.held_out_sources):
        yield "data.val: weight has no effect: every held-out prompt is asked at each validation; drop it"


def _programs(config: Config) -> Iterator[str]:
    if config.agent.has_program and config.data.chat_template == "always":
        yield "data.chat_template=always: programs get text prompts as a user's message anyway; leave it at auto"
    yield from program_problems(
        config.agent,
        n=config.rollout.n,
        by_program=config.reward.by_program,
        max_response_length=config.data.max_response_length,
        stall_timeout_s=config.cluster.stall_timeout_s,
    )
    yield from sandbox_problems(config.sandbox, config.agent)


def _reward(config: Config) -> Iterator[str]:
    reward, data = config.reward, config.data
    labels = [one.label for one in reward.all]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        yield f"reward.functions: {', '.join(twice)} is the name of more than one; give them names of their own"
    if any(one.function == "task" for one in reward.all) and data.task is None:
        yield "reward.function=task is data.task's verifier, and no task is given; use exact_match or file.py:function"
    overlong = reward.overlong_buffer
    if overlong.enable and overlong.len > data.max_response_length:
        yield (
            f"reward.overlong_buffer.len={overlong.len} is more than data.max_response_length="
            f"{data.max_response_length}: every answer would be penalised; lower it"
        )


def _length(config: Config) -> Iterator[str]:
    total, epochs = config.rollout.total_rollout_steps, config.data.epochs
    if (total is None) == (epochs is None):
        given = "neither is given" if total is None else "both are given; set one of them to null"
        yield f"length of the run: expected exactly one of rollout.total_rollout_steps and data.epochs, but {given}"


def _sampling(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if not all(rollout.stop):
        yield "rollout.stop: an empty string ends every answer before it begins; drop it"
    if rollout.temperature == 0:
        yield "rollout.temperature=0 is greedy: all trajectories of a group would be equal, with nothing to learn from"
    for key, value, off in (
        ("top_p", rollout.top_p, 1),
        ("top_k", rollout.top_k, 0),
        ("min_p", rollout.min_p, 0),
        ("repetition_penalty", rollout.repetition_penalty, 1),
        ("logit_bias", rollout.logit_bias, {}),
        ("min_tokens", rollout.min_tokens, 0),
    ):
        if value != off and not _corrects_the_sampler(config):
            yield (
                f"rollout.{key}={value} changes the policy that samples, and nothing corrects for the difference to "
                f"the policy that is trained; set it to {off} (off), or set async_training.use_rollout_log_probs=false "
                "and algorithm.rollout_correction.name=truncate"
            )
    if rollout.min_tokens > config.data.max_response_length:
        yield (
            f"rollout.min_tokens={rollout.min_tokens} is more than data.max_response_length="
            f"{config.data.max_response_length}: no answer could be that long; lower it"
        )
    if rollout.val_n > 1 and rollout.val_temperature == 0:
        yield f"rollout.val_n={rollout.val_n}: greedy answers are all equal; set rollout.val_temperature above 0"


def _corrects_the_sampler(config: Config) -> bool:
    """Tell whether a token's weight in the loss accounts for the probability with which the token was sampled."""
    if config.algorithm.policy_loss.weighs_behaviour:
        return True
    weighs = any(
        one.name in ("truncate", "mask") or names_user_code(one.name or "") for one in config.algorithm.corrections
    )
    return weighs and not config.async_training.use_rollout_log_probs


def _asynchrony(config: Config) -> Iterator[str]:
    settings, b = config.async_training, config.groups_per_version
    eta, overlapped, shared = (
        settings.staleness_threshold,
        config.param_update.schedule == "overlapped",
        config.cluster.placement == "shared",
    )
    needed = floor(1 + eta - Fraction(1, b))
    if settings.max_lag is not None and settings.on_overdue == "wait" and settings.max_lag < needed:
        yield (
            f"async_training.max_lag={settings.max_lag} with on_overdue=wait: with η={float(eta):g} and B={b} more "
            f"groups than one version trains can fall due at once; expected at least ⌊1+η−1/B⌋ = {needed}, a smaller "
            "η, or on_overdue=drop"
        )
    if overlapped and floor(eta * b) == 0:
        yield (
            f"param_update.schedule=overlapped with η={float(eta):g}: nothing may be admitted before the new version "
            "is loaded, so the trainer would wait for it anyway; set async_training.staleness_threshold above 0, or "
            "param_update.schedule=synchronous"
        )
    if overlapped and shared:
        yield (
            "param_update.schedule=overlapped with cluster.placement=shared: training and generation take turns on "
            "shared devices, so nothing overlaps; set one of them to its other value"
        )
    if shared and settings.on_update == "keep":
        yield (
            "async_training.on_update=keep with cluster.placement=shared: an engine that sleeps frees the KV cache "
            "that keep would go on with; set on_update to interrupt or drain"
        )


def _patience(config: Config) -> Iterator[str]:
    reward, stall = config.reward, config.cluster.stall_timeout_s
    slowest = reward.timeout_s * (1 + reward.retries)
    if slowest >= stall:
        yield (
            f"reward.timeout_s={reward.timeout_s:g} × {1 + reward.retries} tries lets one reward take {slowest:g} s, "
            f"but cluster.stall_timeout_s={stall:g} would end the run first; raise it above that"
        )
    if config.param_update.timeout_s >= stall:
        yield (
            f"param_update.timeout_s={config.param_update.timeout_s:g}: a replica that does not answer would be waited "
            f"for until cluster.stall_timeout_s={stall:g} ends the run; lower the first, or raise the second above it"
        )


def _devices(config: Config) -> Iterator[str]:
    try:
        placement = resolve_placement(config)
    except ConfigError as error:
        yield str(error)
        return
    if config.cluster.placement == "shared" and LOGP in placement.devices and not placement.shared(LOGP, ACTOR):
        yield (
            f"logp.nnodes={config.logp.nnodes} with cluster.placement=shared: weights are handed over within the "
            "trainer's processes there and reach no others; set logp.nnodes=0, or cluster.placement=split"
        )
    yield from _mesh(config, placement)
    for argument in sorted(OF_DEVICES & set(config.rollout.engine_kwargs)):
        yield (
            f"rollout.engine_kwargs.{argument}: vLLM would take devices that the run did not reserve for it, or in "
            "another way; give rollout.tensor_model_parallel_size, and replicas by rollout.n_gpus_per_node"
        )


def _mesh(config: Config, placement: Placement) -> Iterator[str]:
    parallel = config.actor.parallel
    if parallel.is_plain or config.cluster.backend == "inline":  # one rank, which `_backend` says
        return
    if parallel.cp > 1 and config.model.packing == "padded":
        yield (
            f"actor.parallel.cp={parallel.cp} divides packed lines of tokens, and model.packing=padded has none; set "
            "cp=1, or drop model.packing"
        )
    for role in (ACTOR, REF, LOGP, CRITIC):
        own = placement.devices.get(role, ())
        if not own or (role != ACTOR and placement.shared(role, ACTOR)):
            continue
        section, whose = (config.trainer, "trainer") if role == ACTOR else (getattr(config, role), role)
        if config.trainer.use_nodes_ratios is None or role == CRITIC:
            yield from parallel.problems(section.nnodes, section.n_gpus_per_node, f"{whose}.nnodes × n_gpus_per_node")
            continue
        problems = [*parallel.problems(1, len(own), f"trainer.use_nodes_ratios for {role}")]
        yield from problems
        groups = placement.groups(role, parallel.inner)
        if not problems and any(placement.straddles(group) for group in groups):
            yield (
                f"actor.parallel: cp={parallel.cp} × tp={parallel.tp} is {parallel.inner} ranks, which have to be on "
                f"one machine, and trainer.use_nodes_ratios gives {role} devices {own[0]}-{own[-1]} of machines with "
                f"{config.trainer.n_gpus_per_node} each: some would be on two; give shares that begin and end with a "
                "machine, or lower cp or tp"
            )


def _backend(config: Config) -> Iterator[str]:
    if config.cluster.backend == "ray":
        address = config.cluster.address
        if address is not None and address != "auto" and not _names_a_port(address):
            yield (
                f"cluster.address={address!r}: expected host:port, as `ray start --head` printed it, or auto; leave it "
                "out to start Ray here"
            )
        return
    if config.trainer.use_nodes_ratios is not None:
        yield "trainer.use_nodes_ratios divides devices among processes; cluster.backend=inline has one process"
    else:
        ranks = {
            "trainer.*": config.trainer.nnodes * config.trainer.n_gpus_per_node,
            "actor.parallel": config.actor.parallel.least_ranks,
        }
        if asks := [f"{setting} asks for {count}" for setting, count in ranks.items() if count > 1]:
            yield (
                f"cluster.backend=inline has one process, so one training rank; {' and '.join(asks)}; set "
                "cluster.backend=ray, or leave that out"
            )
    if config.rollout.nnodes > 1:
        yield (
            f"rollout.nnodes={config.rollout.nnodes} asks for so many machines, and cluster.backend=inline is one "
            "process; set rollout.nnodes=1, and rollout.n_gpus_per_node to the number of replicas"
        )


def _names_a_port(address: str) -> bool:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    return bool(host) and "/" not in host and port.isascii() and port.isdigit() and 0 < int(port[:9]) < 65536


def _update(config: Config) -> Iterator[str]:
    update, backend, shared = config.param_update, config.cluster.backend, config.cluster.placement == "shared"
    transport = transport_of(update.transport, backend=backend, shared=shared)
    facts = TRANSPORTS[transport]
    if shared and not facts.within_process:
        yield (
            f"param_update.transport={transport} with cluster.placement=shared: trainer and engine are one process, "
            f"which hands weights over by {WITHIN_PROCESS}; drop the transport"
        )
    if not shared and backend not in facts.backends:
        able = [name for name, other in TRANSPORTS.items() if backend in other.backends]
        yield (
            f"param_update.transport={transport} does not work with cluster.backend={backend}; "
            f"set it to {', '.join(able)}, or auto"
        )
    if update.encoding == "delta" and not facts.carries_delta:
        able = [name for name, other in TRANSPORTS.items() if other.carries_delta and backend in other.backends]
        way_out = "" if shared else f", or the transport to {' or '.join(able)}"
        yield (
            f"param_update.encoding=delta with param_update.transport={transport}: {facts.no_delta}; "
            f"set the encoding to full{way_out}"
        )
    if update.encoding == "delta" and not config.rollout.enable_dual_buffer:
        yield (
            "param_update.encoding=delta with rollout.enable_dual_buffer=false: a delta is applied to a copy that a "
            "second buffer keeps; set one of them to its other value"
        )


def _notes(loaded: LoadedConfig) -> Iterator[str]:
    config = loaded.config
    yield from sandbox_notes(config.sandbox, config.agent.tools, config.reward.names)
    settings, b = config.async_training, config.groups_per_version
    of_mode, usual = preset(config.mode), without_effect(mode_config(config.mode))
    for key, reason in without_effect(config).items():
        if key not in loaded.user_keys and key not in usual and of_mode.get(key) is not None:
            yield f"{key}={of_mode[key]} of mode {config.mode} has no effect: {reason}"
    total, optim = config.rollout.total_rollout_steps, config.actor.optim
    if total is not None and (steps := total // config.actor.ppo_mini_batch_size * config.actor.ppo_epochs) <= (
        optim.lr_warmup_steps
    ):
        yield f"actor.optim.lr_warmup_steps={optim.lr_warmup_steps} covers all {steps} optimizer steps of the run"
    longest, budget = (
        config.data.max_prompt_length + config.data.max_response_length,
        (config.actor.ppo_max_token_len_per_gpu),
    )
    if budget < longest:
        yield (
            f"actor.ppo_max_token_len_per_gpu={budget} is less than the longest sequence, data.max_prompt_length="
            f"{config.data.max_prompt_length} + data.max_response_length={config.data.max_response_length} = {longest} "
            f"tokens: longer ones are a micro-batch each, and training needs memory for {longest} tokens at once. "
            f"Raise it to {longest} at least, or lower the lengths{_to_share(config)}"
        )
    elif (to_share := _to_share(config)) and budget < longest + config.data.max_response_length:
        yield f"actor.ppo_max_token_len_per_gpu={budget} has no room for two of the longest answers{to_share}"
    slots, most = config.rollout.max_concurrent, most_in_flight(config)
    most += most // config.rollout.n if needs_greedy_baseline(config) else 0
    if slots is not None and slots > max(most, MOST_SLOTS):
        yield (
            f"rollout.max_concurrent={slots}: at most {most} answers are in flight in training, so more slots have no "
            "effect there but on memory; null is as many as are needed"
        )
    ahead = floor(settings.staleness_threshold * b) > 0
    if settings.order is Order.READY and ahead and settings.max_lag is None:
        yield (
            "async_training.order=ready with η > 0 has no bound on lag: a slow group can be overtaken again and again; "
            "async_training.max_lag sets one"
        )


def _to_share(config: Config) -> str:
    """Return the end of a note: the tokens that a group takes at most, where rows are to share their prompt."""
    group = config.data.max_prompt_length + config.rollout.n * config.data.max_response_length
    if config.model.packing != "shared" or config.rollout.n == 1:
        return ""
    return f"; a group's prompt is computed once only where the group fits: about {group} tokens here, at most"


def machine_notes(config: Config, *, cores: int, gpus: int | None) -> Iterator[str]:
    """Notes on a run on this machine with ``cores``, and ``gpus`` where their number is known.

    Says nothing of a run that joins a cluster elsewhere, and nothing of cores where a run is one process.
    """
    if config.cluster.address is not None:
        return
    if config.cluster.device == "cuda" and gpus == 0:
        yield "cluster.device=cuda, and there is no GPU here: a run on this machine is refused. cpu is for small models"
    if config.cluster.backend == "inline":
        return
    placement = resolve_placement(config)
    processes = len({device for devices in placement.devices.values() for device in devices})
    for owner, nodes in several_nodes(config).items():
        yield (
            f"{owner}.nnodes={nodes} asks for {nodes} machines, and without cluster.address a run is on this one: it "
            f"is refused. Join a cluster, or ask for more devices of one machine ({owner}.n_gpus_per_node)"
        )
    asked = ", ".join(f"{role} {len(devices)}" for role, devices in placement.devices.items())
    if config.cluster.device == "auto" and gpus == 0:
        yield (
            f"there is no GPU here, and cluster.device=auto: all {processes} processes ({asked}) compute on the CPU, "
            "which is for small models alone. Set cluster.device=cuda to be refused instead, or cpu if it is meant"
        )
    on_cpus = config.cluster.device == "cpu" or (config.cluster.device == "auto" and gpus == 0)
    if on_cpus and processes > cores:
        yield (
            f"{processes} worker processes ({asked}) on {cores} {'core' if cores == 1 else 'cores'}: they take turns, "
            "and each is slower for it. Lower trainer.n_gpus_per_node and rollout.n_gpus_per_node"
        )


def check_vllm_installed() -> None:
    """Raise `ConfigError` where vLLM is not installed. Imports neither it nor torch."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"rollout.name=vllm, but vLLM is not installed here (on {platform.node()}, for {sys.executable}); "
            "install it (for a CPU: the packages of constraints-vllm.txt), or set rollout.name=native"
        )
