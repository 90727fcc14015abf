"""Checks of a whole configuration: settings that clash or have no effect are refused, all at once, with reasons."""

from __future__ import annotations

import importlib.util
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

from headway.config.checks import SEQUENCE_MASK, facts, idle_keys, problems, rules, unread_by_sft, without_effect
from headway.config.layers import lies_in
from headway.config.loading import LoadedConfig, mode_config
from headway.config.presets import preset
from headway.config.schema import Config
from headway.config.sections.agent_section import CODE, program_problems
from headway.config.sizing.placement import ACTOR, CRITIC, LOGP, REF, Placement, resolve_placement, several_nodes
from headway.config.transport_facts import TRANSPORTS, transport_of
from headway.errors import ConfigError
from headway.runtime.sandbox.python_tool import PYTHON
from headway.runtime.sandbox.sandbox import TELLS
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
"""vLLM's arguments for the number and division of its devices."""
FIRST_RELEASES = {"torch": (2, 11), "transformers": (5, 19)}
"""Oldest releases that work, as in pyproject.toml: Headway may run without having been installed."""


def diagnose(loaded: LoadedConfig, *, supervised: bool = False) -> list[str]:
    """Return notes on a configuration that can run: those of loading, and remarks on its combination of settings.

    ``supervised``: True for ``headway sft``. One file serves ``headway sft`` and ``headway train``, so unread settings
    are problems only if they were given outside the file.

    Raises:
        ConfigError: in one message, a line for each problem.
    """
    known = facts(loaded.config)
    found: list[str] = []
    for part in SFT_PARTS if supervised else [part for part in rules()["problems"] if part not in NO_PARTS]:
        found += problems(part, known)
        found += [problem for check in CHECKS.get(part, ()) for problem in check(loaded.config)]
    idle = idle_keys(known)
    chosen = loaded.user_keys - loaded.usual_keys  # a run's own file gives all keys: usual values were not chosen
    found += [
        f"{key} has no effect: {reason}" for key, reason in idle.items() if any(lies_in(one, key) for one in chosen)
    ]
    if supervised:
        found += unread_by_sft(loaded.typed_keys)
    # All problems in one message.
    if found:
        raise ConfigError("\n".join(found))
    return loaded.notes if supervised else [*loaded.notes, *_notes(loaded, idle), *problems("notes", known)]


def _data(config: Config) -> Iterator[str]:
    data = config.data
    weighted = [source.weight is not None for source in data.train_sources]
    if any(weighted) and not all(weighted):
        without = ", ".join(source.label for source in data.train_sources if source.weight is None)
        yield f"data.train: {without} has no weight, and others have; give every source one, or none"
    elif weighted == [True]:
        yield f"data.train: weight has no effect: {data.train_sources[0].label} is the only source; drop it"
    if any(source.weight is not None for source in data.held_out_sources):
        yield "data.val: weight has no effect: every held-out prompt is asked at each validation; drop it"


def _reward(config: Config) -> Iterator[str]:
    labels = [one.label for one in config.reward.all]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        yield f"reward.functions: {', '.join(twice)} is the name of more than one; give them names of their own"


def _mcp(config: Config) -> Iterator[str]:
    for name, server in config.agent.mcp.items():
        values, key = server.model_dump(), f"agent.mcp.{name}"
        named = re.fullmatch(r"[\w-]+", name) is not None
        spelled = {"name": repr(name), "named": named, "key": key} | {
            f"key.{field}": f"{key}.{field}" for field in values
        }
        yield from problems("mcp", values | spelled | {"step_timeout_s": config.agent.step_timeout_s})


def _sampling(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if not all(rollout.stop):
        yield "rollout.stop: an empty string ends every answer before it begins; drop it"
    neutral = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "logit_bias": {}, "min_tokens": 0}
    for key, off in neutral.items():
        if (value := getattr(rollout, key)) != off and not _corrects_the_sampler(config):
            yield (
                f"rollout.{key}={value} changes the policy that samples, and nothing corrects for the difference to "
                f"the policy that is trained; set it to {off} (off), or set async_training.use_rollout_log_probs=false "
                "and algorithm.rollout_correction.name=truncate"
            )


def _corrects_the_sampler(config: Config) -> bool:
    """Tell whether a token's weight in the loss depends on the probability with which the token was sampled."""
    if config.algorithm.policy_loss.weighs_behaviour:
        return True
    weighs = any(
        one.name in ("truncate", "mask") or names_user_code(one.name or "") for one in config.algorithm.corrections
    )
    return weighs and not config.async_training.use_rollout_log_probs


def _algorithm(config: Config) -> Iterator[str]:
    algorithm, loss = config.algorithm, config.algorithm.policy_loss
    given = algorithm.rollout_correction
    if isinstance(given, tuple) and len(algorithm.corrections) < len(given):
        yield "algorithm.rollout_correction: every correction of a list needs a name"
    for one in algorithm.corrections:
        if loss.weighs_behaviour and one.name != SEQUENCE_MASK:
            yield (
                f"algorithm.policy_loss.loss_mode={loss.loss_mode} weighs by π_θ/π_behav itself; with "
                f"algorithm.rollout_correction.name={one.name} staleness would be corrected twice; drop one of the two"
            )
        if (one.lower is not None and one.lower > 1) or (one.bound is not None and one.bound < 1):
            yield (
                f"algorithm.rollout_correction: {one.name} with lower={one.lower}, bound={one.bound} is for tokens "
                "that are off policy alone: a ratio of 1 lies outside; expected lower ≤ 1 ≤ bound"
            )


def _devices(config: Config) -> Iterator[str]:
    try:
        placement = resolve_placement(config)
    except ConfigError as error:
        # The mesh is not checked: its devices are unknown.
        yield str(error)
        return
    yield from _mesh(config, placement)
    for argument in sorted(OF_DEVICES & set(config.rollout.engine_kwargs)):
        yield (
            f"rollout.engine_kwargs.{argument}: vLLM would take devices that the run did not reserve for it, or in "
            "another way; give rollout.tensor_model_parallel_size, and replicas by rollout.n_gpus_per_node"
        )


def _mesh(config: Config, placement: Placement) -> Iterator[str]:
    parallel = config.actor.parallel
    if parallel.is_plain or config.cluster.backend == "inline":  # inline has one rank, for which there is a rule
        return
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


def _update(config: Config) -> Iterator[str]:
    update, backend, shared = config.param_update, config.cluster.backend, config.cluster.placement == "shared"
    transport = transport_of(update.transport, backend=backend, shared=shared)
    facts = TRANSPORTS[transport]
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


def _notes(loaded: LoadedConfig, idle: Mapping[str, str]) -> Iterator[str]:
    config = loaded.config
    if config.sandbox.kind == "process_limits" and (PYTHON in config.agent.tools or CODE in config.reward.names):
        yield TELLS
    of_mode, usual = preset(config.mode), without_effect(mode_config(config.mode))
    for key, reason in idle.items():
        # Settings that are idle by the mode alone get no note.
        if key not in loaded.user_keys and key not in usual and of_mode.get(key) is not None:
            yield f"{key}={of_mode[key]} of mode {config.mode} has no effect: {reason}"


CHECKS: Mapping[str, tuple[Callable[[Config], Iterator[str]], ...]] = {
    "data": (_data,),
    "reward": (_reward,),
    "programs": (lambda config: program_problems(config.agent), _mcp),
    "sampling": (_sampling,),
    "algorithm": (_algorithm,),
    "devices": (_devices,),
    "update": (_update,),
}
"""Part of the configuration → its computed checks. ``checks.toml`` has all parts, in the order of the report."""
SFT_PARTS = ("conversations", "model", "data", "devices", "backend")
"""Parts that ``headway sft`` reads."""
NO_PARTS = ("conversations", "mcp", "notes")
"""Parts of ``checks.toml`` that are not about a run: for ``headway sft``, for each MCP server, and for remarks."""


def machine_notes(config: Config, *, cores: int, gpus: int | None) -> Iterator[str]:
    """Yield notes on a run on this machine. ``cores``: number of cores; ``gpus``: number of GPUs, None if unknown.

    A run that joins a cluster has no notes, and a run of one process none on cores.
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


def check_releases() -> None:
    """Raise `ConfigError` if a package of `FIRST_RELEASES` is too old or not installed. Imports none of them."""
    found, needed = [], []
    for name, first in FIRST_RELEASES.items():
        try:
            there = version(name)
        except PackageNotFoundError:
            there = ""
        if not there or tuple(map(int, there.split(".")[:2])) < first:
            found.append(f"{name} {there}" if there else f"no {name}")
            needed.append(f"'{name}>={'.'.join(map(str, first))}'")
    if found:
        raise ConfigError(
            f"{' and '.join(found)} here (on {platform.node()}, for {sys.executable}), and Headway needs "
            f"{' and '.join(needed)}: pip install {' '.join(needed)}"
        )


def check_vllm_installed() -> None:
    """Raise `ConfigError` if vLLM is not installed. Imports neither vLLM nor torch."""
    # Located, not imported: an import takes seconds, and the GPU.
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"rollout.name=vllm, but vLLM is not installed here (on {platform.node()}, for {sys.executable}); "
            "install it (for a CPU: the packages of constraints-vllm.txt), or set rollout.name=native"
        )
