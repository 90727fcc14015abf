"""Memory of the processes of a configured run: its roles, placed, with the sizes of its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headway.config.schema import Config
from headway.config.sections.model_section import MakeModelConfig
from headway.config.sizing.model_shape import FLOAT, ModelShape
from headway.config.sizing.placement import (
    ACTOR,
    CRITIC,
    LOGP,
    REF,
    ROLLOUT,
    Placement,
    concurrent,
    resolve_placement,
)
from headway.config.sizing.process_memory import (
    MemoryItem,
    Mesh,
    ProcessMemory,
    TrainingStep,
    checkpoint,
    critic,
    machine,
    reference,
    replica,
    room,
    trainer,
    update,
)
from headway.config.transport_facts import TRANSPORTS, between_devices, transport_of
from headway.errors import ConfigError

MIB, GIB = 2**20, 2**30
REPLICA, OF_REPLICA = "replica", "device of a replica"
"""Names of processes that generate, alone or with others."""


SNAPSHOTS = 2
"""Most snapshots of a rank at once: the one that is complete, and the next one."""
BYTES_PER_TOKEN = 4 + 4 + 4 + 1
"""Bytes of a token's id, log-prob, version and mask."""


def restarts_ranks(config: Config) -> bool:
    """Tell whether ranks of a reference, or of log-probs, are started again where they are lost."""
    cluster = config.cluster
    return cluster.backend == "ray" and cluster.placement == "split" and config.trainer.max_restarts > 0


def restarts_trainer(config: Config) -> bool:
    """Tell whether a trainer or critic that is lost is started again, and trained again on what is kept for that."""
    return restarts_ranks(config) and config.trainer.save_freq > 0


def token_bytes(config: Config) -> int:
    """Return the bytes of all tokens that may wait at once, or be trained on again, one row for an episode."""
    group = (config.rollout.n + 1) * (config.data.max_prompt_length + config.data.max_response_length)
    groups = (1 + config.async_training.staleness_threshold) * config.groups_per_version + config.groups_per_batch
    if restarts_trainer(config):  # until the next checkpoint is written, beside which the one after it falls due
        groups += 2 * config.trainer.save_freq * config.groups_per_version
    return int(groups * group * BYTES_PER_TOKEN)


@dataclass(frozen=True, slots=True)
class RunProcess:
    """Equal processes of a run, one per device; or machines, with the memory their processes share."""

    name: str
    count: int
    memory: ProcessMemory


def made(make: MakeModelConfig) -> Mapping[str, Any]:
    """Return what ``config.json`` of a made model says of its sizes."""
    sizes = make.model_dump(exclude={"architecture", "vocabulary", "special_tokens", "chat_template"})
    return {
        **sizes,
        "model_type": make.architecture,
        "vocab_size": len(make.vocabulary) + len(make.special_tokens) + 2,
    }


def processes(config: Config, shape: ModelShape, *, on_cpu: bool, device_bytes: int | None = None) -> list[RunProcess]:
    """Return the processes of a run of a model of ``shape``. Those of one process each (``backend: inline``), too.

    Micro-batches are as large as they may be, answers as long, and all slots in use.
    """
    placement = resolve_placement(config)
    step = _step(config, placement, on_cpu=on_cpu, device_bytes=None if on_cpu else device_bytes)
    roles: dict[str, ProcessMemory] = {ACTOR: _trainer(config, shape, step, placement, on_cpu=on_cpu, senders=0)}
    for role, of in ((REF, reference), (LOGP, reference), (CRITIC, critic)):
        if role in placement.devices and not placement.shared(role, ACTOR):
            own = _on(step, len(placement.devices[role]))
            roles[role] = of(shape, own)
            if role == CRITIC:
                roles[role] = roles[role].beside(_saved(config, "critic", shape, own, on_cpu=on_cpu))
    senders = _senders(config, len(placement.devices[ACTOR]), on_cpu=on_cpu)
    generates = _replica(config, shape, senders, on_cpu=on_cpu)
    if placement.shared(ROLLOUT, ACTOR):
        roles[ACTOR] = roles[ACTOR].beside(ProcessMemory((), {"generation": generates.lines}))
    else:
        roles[ROLLOUT] = generates
    counts = {role: len(placement.devices[role]) for role in roles}
    names = {ACTOR: "trainer rank", REF: "reference rank", LOGP: "logp rank", CRITIC: "critic rank"}
    names[ROLLOUT] = REPLICA if placement.per_replica == 1 else OF_REPLICA
    found = [RunProcess(names[role], counts[role], memory) for role, memory in roles.items()]
    if not placement.shared(ROLLOUT, ACTOR):
        sending = _trainer(config, shape, step, placement, on_cpu=on_cpu, senders=senders)
        others = counts[ACTOR] - senders
        found[:1] = [RunProcess("trainer rank that sends" if others else names[ACTOR], senders, sending)]
        if others:
            found.insert(1, RunProcess("trainer rank that does not", others, roles[ACTOR]))
    shared = machine(shape, _served(config, on_cpu=on_cpu), on_cpu=on_cpu)
    apart = config.rollout.name == "native" and (not config.rollout.enable_dual_buffer or _on_devices(config, on_cpu))
    if ROLLOUT in roles and not apart:
        found.append(RunProcess("machine with replicas", len(placement.on_nodes(ROLLOUT)), shared))
    tokens = MemoryItem("tokens of groups that wait, or may be trained on again", token_bytes(config), not on_cpu)
    # One of the keepers may be on the ranks' machine: they take others.
    ranks = -(-step.mesh.ranks // max(1, len(placement.on_nodes(ROLLOUT)) - 1))
    nbytes = SNAPSHOTS * ranks * 3 * FLOAT * step.mesh.share(shape) * (2 if placement.shared(CRITIC, ACTOR) else 1)
    snapshots = MemoryItem(f"snapshots of training ranks: {SNAPSHOTS} of {ranks}", nbytes, on_host=not on_cpu)
    kept = (tokens,) if config.trainer.snapshot is None else (tokens, snapshots)
    found.append(RunProcess("machine with episode workers", 1, ProcessMemory(kept, {})))
    if LOGP in roles:
        found.append(RunProcess("machine with logp ranks", len(placement.on_nodes(LOGP)), shared))
    return found


SIZES = frozenset({"gpu_memory_utilization", "kv_cache_memory_bytes", "cpu_offload_gb"})
"""Arguments of vLLM's with which the user says what it takes of a GPU."""


@dataclass(frozen=True, slots=True)
class ReplicaRoom:
    """Room for a replica on each of its GPUs."""

    share: float
    """Part of the device that the replica may take, for vLLM's ``gpu_memory_utilization``."""
    cache_bytes: int
    """Bytes of it for keys and values."""


def replica_room(config: Config, shape: ModelShape, device_bytes: int) -> ReplicaRoom:
    """Return what is left for a replica on a GPU of ``device_bytes``: beside a training rank that shares it, less.

    Raises:
        ConfigError: there is no room for one whole answer, and the user has not chosen the room.
    """
    placement = resolve_placement(config)
    held = 0
    if placement.shared(ROLLOUT, ACTOR):
        step = _step(config, placement, on_cpu=False, device_bytes=device_bytes)
        rank = _trainer(config, shape, step, placement, on_cpu=False, senders=0)
        # From the first step on. Before it the moments are not there: what starts now must fit when it wakes up then.
        held = sum(line.nbytes for line in rank.held if not line.on_host)
    left = room(device_bytes) - held
    alone = _replica(config, shape, len(placement.devices[ACTOR]), on_cpu=False, cache_bytes=0).device
    context = config.data.max_prompt_length + config.data.max_response_length
    answer = context * shape.cache(_served(config, on_cpu=False), config.rollout.tensor_model_parallel_size)
    chosen = config.rollout.kv_cache_gib is not None or not SIZES.isdisjoint(config.rollout.engine_kwargs)
    if left < alone + answer and not chosen:
        beside = f", of which the training rank on it holds {held / 1e9:.1f}" if held else ""
        offload = "actor.fsdp_config.param_offload=true, " if held else ""
        raise ConfigError(
            f"a replica takes {alone / 1e9:.1f} GB of each GPU, and {answer / 1e9:.1f} for the keys and values of one "
            f"answer of {context} tokens; a GPU has {device_bytes / 1e9:.1f}{beside}, and libraries need a tenth; set "
            f"{offload}give more GPUs, or lower data.max_response_length"
        )
    return ReplicaRoom(left / device_bytes, left - alone)


def _senders(config: Config, ranks: int, *, on_cpu: bool) -> int:
    """Number of the trainer's ranks that send weights to replicas on other devices."""
    facts = TRANSPORTS[transport_of(config.param_update.transport, backend=config.cluster.backend, shared=False)]
    if _on_devices(config, on_cpu):
        return 1
    return min(facts.most_senders, ranks // config.actor.parallel.replicate)


def _on_devices(config: Config, on_cpu: bool) -> bool:
    """Tell whether new weights go from the trainer's GPUs to those of others."""
    update = config.param_update
    return not on_cpu and between_devices(update.transport, update.schedule, update.encoding, config.cluster.backend)


def _step(config: Config, placement: Placement, *, on_cpu: bool, device_bytes: int | None) -> TrainingStep:
    actor, data = config.actor, config.data
    mesh = Mesh(len(placement.devices[ACTOR]), actor.parallel)
    longest = data.max_prompt_length + data.max_response_length
    inner = actor.parallel.inner
    groups = -(-actor.ppo_mini_batch_size * inner // mesh.ranks)  # of a mini-batch, on each data rank
    all_rows = -(-groups * config.rollout.n * longest // actor.parallel.cp)
    budget = max(actor.ppo_max_token_len_per_gpu, -(-longest // actor.parallel.cp))
    return TrainingStep(
        mesh=mesh,
        tokens=min(budget, all_rows),
        itemsize=_itemsize(config.model.dtype, on_cpu=on_cpu),
        recompute=config.model.enable_gradient_checkpointing,
        reshard=actor.fsdp_config.reshard_after_forward,
        offload=actor.fsdp_config.param_offload and not on_cpu,
        device_bytes=device_bytes,
        entropy=actor.entropy_coeff > 0,
    )


def _on(step: TrainingStep, ranks: int) -> TrainingStep:
    """Return ``step`` on another number of ranks."""
    return replace(step, mesh=Mesh(ranks, step.mesh.parallel))


def _trainer(
    config: Config, shape: ModelShape, step: TrainingStep, placement: Placement, *, on_cpu: bool, senders: int
) -> ProcessMemory:
    """``senders``: number of ranks that send weights, of which this is one; 0 if it is not."""
    memory = trainer(shape, step).beside(_saved(config, "trainer", shape, step, on_cpu=on_cpu))
    if placement.shared(REF, ACTOR):
        memory = memory.beside(reference(shape, step))
    if placement.shared(CRITIC, ACTOR):
        memory = memory.beside(critic(shape, step)).beside(_saved(config, "critic", shape, step, on_cpu=on_cpu))
    if placement.shared(LOGP, ACTOR) and config.async_training.trigger_parameter_sync_step > 1:
        share = FLOAT * step.mesh.share(shape)
        copy = MemoryItem("weights at the version's start", share, on_host=not on_cpu)
        now = MemoryItem("the present weights, meanwhile", share, on_host=not on_cpu)
        memory = memory.beside(ProcessMemory((copy,), {"log-probs of the version's start": (now,)}))
    bucket = int(config.rollout.param_update_preduce_bucket_size_mb * MIB)
    served = _served(config, on_cpu=on_cpu)
    keeps = config.param_update.schedule == "overlapped" or config.param_update.encoding == "delta"
    shared = placement.shared(ROLLOUT, ACTOR) and len(placement.devices[ACTOR]) > 1
    through = not on_cpu and not _on_devices(config, on_cpu)
    sends = update(
        shape, served, bucket, senders=senders, copy=keeps, on_cpu=on_cpu, through_host=through, shared=shared
    )
    return memory.beside(sends)


def _saved(config: Config, name: str, shape: ModelShape, step: TrainingStep, *, on_cpu: bool) -> ProcessMemory:
    """Memory of a rank for the checkpoints of a model that it trains: the trainer's, or the critic's without a head."""
    weights = step.mesh.share(replace(shape, tied=True) if name == "critic" else shape)
    return checkpoint(name, weights, beside_training=config.trainer.save_freq > 0, on_cpu=on_cpu)


def _replica(
    config: Config, shape: ModelShape, senders: int, *, on_cpu: bool, cache_bytes: int | None = None
) -> ProcessMemory:
    """``cache_bytes``: for keys and values; None for what the settings ask for."""
    rollout = config.rollout
    if cache_bytes is None and rollout.kv_cache_gib is not None:
        cache_bytes = int(rollout.kv_cache_gib * GIB)
    context = config.data.max_prompt_length + config.data.max_response_length
    slots = concurrent(config)
    shared = config.cluster.placement == "shared"
    # A cut or parked answer is read again with all that it has; only vLLM on GPUs divides a context over steps.
    undivided = context if on_cpu or rollout.name == "native" else 0
    return replica(
        shape,
        itemsize=_served(config, on_cpu=on_cpu),
        cached_tokens=slots * context,
        cache_bytes=cache_bytes,
        slots=slots,
        prefill=max(min(rollout.max_batched_tokens, slots * context), undivided),
        bucket=(1 if shared else senders) * int(rollout.param_update_consume_bucket_size_mb * MIB),
        in_place=shared or not rollout.enable_dual_buffer,
        on_device=rollout.name == "native" and (shared or _on_devices(config, on_cpu)),
        on_cpu=on_cpu,
        devices=rollout.tensor_model_parallel_size,
    )


def _served(config: Config, *, on_cpu: bool) -> int:
    dtype = config.rollout.dtype
    return _itemsize(config.model.dtype if dtype == "auto" else dtype, on_cpu=on_cpu)


def _itemsize(dtype: str, *, on_cpu: bool) -> int:
    return FLOAT if dtype == "float32" or (dtype == "auto" and on_cpu) else FLOAT // 2
