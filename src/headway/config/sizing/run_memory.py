"""Memory of the processes of a configured run, from its roles' placement and its model's sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headway.config.schema import Config
from headway.config.sections.model_section import MakeModelConfig
from headway.config.sizing import process_memory
from headway.config.sizing.model_shape import FLOAT, ModelShape
from headway.config.sizing.placement import ACTOR, CRITIC, LOGP, REF, ROLLOUT, Placement, concurrent, resolve_placement
from headway.config.sizing.process_memory import MemoryItem, Mesh, ProcessMemory, TrainingStep, room, up
from headway.config.transport_facts import TRANSPORTS, between_devices, transport_of
from headway.errors import ConfigError

MIB, GIB = 2**20, 2**30
REPLICA, OF_REPLICA = "replica", "device of a replica"
"""Names of generating processes: a replica on one device, or one device of a replica."""


SNAPSHOTS = 2
"""Maximum number of snapshots of a rank at once: the complete one and the next one."""
BYTES_PER_TOKEN = 4 + 4 + 4 + 1
"""Bytes of a token's id, log-prob, version and mask."""


def restarts_ranks(config: Config) -> bool:
    """Tell whether lost ranks of a reference, or of log-probs, are restarted."""
    return config.cluster.backend == "ray" and config.trainer.max_restarts > 0


def restarts_trainer(config: Config) -> bool:
    """Tell whether a lost trainer or critic is restarted, and repeats the kept batches."""
    return restarts_ranks(config) and config.trainer.save_freq > 0


def token_bytes(config: Config) -> int:
    """Return the bytes of all tokens that may wait at once or be kept for repetition, with one row per episode."""
    group = (config.rollout.n + 1) * (config.data.max_prompt_length + config.data.max_response_length)
    groups = (1 + config.async_training.staleness_threshold) * config.groups_per_version + config.groups_per_batch
    if restarts_trainer(config):  # until the next checkpoint is written; the one after it may be due by then
        groups += 2 * config.trainer.save_freq * config.groups_per_version
    return int(groups * group * BYTES_PER_TOKEN)


@dataclass(frozen=True, slots=True)
class RunProcess:
    """Equal processes of a run, one per device; or machines, with memory that their processes share."""

    name: str
    count: int
    memory: ProcessMemory


def made(make: MakeModelConfig) -> Mapping[str, Any]:
    """Return the sizes of a made model as in its ``config.json``."""
    sizes = make.model_dump(exclude={"architecture", "vocabulary", "special_tokens", "chat_template"})
    return {**sizes, "model_type": make.architecture, "vocab_size": len(make.vocabulary) + len(make.special_tokens) + 2}


def processes(config: Config, shape: ModelShape, *, on_cpu: bool, device_bytes: int | None = None) -> list[RunProcess]:
    """Return the processes of a run with a model of ``shape``; with ``backend: inline`` as if each were separate.

    Micro-batches and answers have their maximum size, and all slots are in use.
    """
    run = _Run(config, shape, on_cpu, None if on_cpu else device_bytes)
    placement, step = run.placement, run.step
    roles: dict[str, ProcessMemory] = {ACTOR: run.trainer(senders=0)}
    for role in (REF, LOGP, CRITIC):
        if role in placement.devices and not placement.shared(role, ACTOR):
            roles[role] = run.own_rank(role, len(placement.devices[role]))
    senders = run.senders(len(placement.devices[ACTOR]))
    generates = run.replica(senders)
    if placement.shared(ROLLOUT, ACTOR):
        roles[ACTOR] = roles[ACTOR].beside(ProcessMemory((), {"generation": generates.lines}))
    else:
        roles[ROLLOUT] = generates
    counts = {role: len(placement.devices[role]) for role in roles}
    names = {ACTOR: "trainer rank", REF: "reference rank", LOGP: "logp rank", CRITIC: "critic rank"}
    names[ROLLOUT] = REPLICA if placement.per_replica == 1 else OF_REPLICA
    found = [RunProcess(names[role], counts[role], memory) for role, memory in roles.items()]
    if not placement.shared(ROLLOUT, ACTOR):
        others = counts[ACTOR] - senders
        name = "trainer rank that sends" if others else names[ACTOR]
        # The first is the trainer's; it becomes two.
        found[:1] = [RunProcess(name, senders, run.trainer(senders=senders))]
        if others:
            found.insert(1, RunProcess("trainer rank that does not", others, roles[ACTOR]))
    received = MemoryItem("new weights, for all who load them", shape.parameters * run.served, on_host=not on_cpu)
    copy = ProcessMemory((received,), {})
    apart = config.rollout.name == "native" and (not config.rollout.enable_dual_buffer or run.on_devices)
    # One copy per machine, if its replicas load from it and not each from its own buffer.
    if ROLLOUT in roles and not apart:
        found.append(RunProcess("machine with replicas", len(placement.on_nodes(ROLLOUT)), copy))
    tokens = MemoryItem("tokens of groups that wait, or may be trained on again", token_bytes(config), not on_cpu)
    # One of the episode workers may be on the ranks' machine: the ranks use others.
    ranks = up(step.mesh.ranks, max(1, len(placement.on_nodes(ROLLOUT)) - 1))
    nbytes = SNAPSHOTS * ranks * 3 * FLOAT * step.mesh.share(shape) * (2 if placement.shared(CRITIC, ACTOR) else 1)
    snapshots = MemoryItem(f"snapshots of training ranks: {SNAPSHOTS} of {ranks}", nbytes, on_host=not on_cpu)
    kept = (tokens,) if config.trainer.snapshot is None else (tokens, snapshots)
    found.append(RunProcess("machine with episode workers", 1, ProcessMemory(kept, {})))
    if LOGP in roles:
        found.append(RunProcess("machine with logp ranks", len(placement.on_nodes(LOGP)), copy))
    return found


def rank_memory(
    config: Config, shape: ModelShape, role: str, ranks: int, *, on_cpu: bool, device_bytes: int | None
) -> ProcessMemory:
    """Return the memory of each of ``ranks`` ranks of ``role``; for the trainer, of a sending rank. ``config`` has
    their mesh; ``device_bytes`` is as for `processes`.
    """
    run = _Run(config, shape, on_cpu, device_bytes, ranks if role == ACTOR else None)
    return run.trainer(senders=run.senders(ranks)) if role == ACTOR else run.own_rank(role, ranks)


SIZES = frozenset({"gpu_memory_utilization", "kv_cache_memory_bytes", "cpu_offload_gb"})
"""vLLM's arguments for its share of a GPU's memory."""


@dataclass(frozen=True, slots=True)
class ReplicaRoom:
    """Memory for a replica on each of its GPUs."""

    share: float
    """Share of the device's memory for the replica: vLLM's ``gpu_memory_utilization``."""
    cache_bytes: int
    """Bytes of that share for keys and values."""
    planned: int
    """Bytes of the device for everything else, including a training rank that shares it."""

    def cache_in(self, free: int, allocated: int) -> int:
        """Return the bytes for keys and values on a device with ``free`` free bytes, perhaps beside other processes.

        ``allocated``: bytes of `planned` that this process has allocated already. Raises `ConfigError` if nothing is
        left.
        """
        to_come = max(0, self.planned - allocated)
        if room(free) <= to_come:
            raise ConfigError(
                f"a replica's GPU has {free / 1e9:.1f} GB left, and beside keys and values {to_come / 1e9:.1f} are "
                "still to be taken there; end other processes that use it, or give another GPU"
            )
        return min(self.cache_bytes, room(free) - to_come)


def replica_room(config: Config, shape: ModelShape, device_bytes: int, *, in_one_process: bool = False) -> ReplicaRoom:
    """Return the memory for a replica on a GPU of ``device_bytes``, less that of a training rank that shares it.

    ``in_one_process``: the trainer and all replicas run in one process and share this GPU, also with split placement.

    Raises:
        ConfigError: one whole answer does not fit, and the user has not chosen the replica's share.
    """
    run, held = _Run(config, shape, on_cpu=False, device_bytes=device_bytes), 0
    if in_one_process or run.placement.shared(ROLLOUT, ACTOR):
        # From the first step on. The optimizer's moments do not exist before; the replica must fit beside them later.
        held = sum(line.nbytes for line in run.trainer(senders=0).held if not line.on_host)
    left = (room(device_bytes) - held) // (len(run.placement.replicas) if in_one_process else 1)
    alone = run.replica(len(run.placement.devices[ACTOR]), cache_bytes=0).device
    answer = run.context * shape.cache(run.served, config.rollout.tensor_model_parallel_size)
    chosen = config.rollout.kv_cache_gib is not None or not SIZES.isdisjoint(config.rollout.engine_kwargs)
    if left < alone + answer and not chosen:
        beside = f", of which the training rank on it holds {held / 1e9:.1f}" if held else ""
        offload = "actor.fsdp_config.param_offload=true, " if held else ""
        raise ConfigError(
            f"a replica takes {alone / 1e9:.1f} GB of each GPU, and {answer / 1e9:.1f} for the keys and values of one "
            f"answer of {run.context} tokens; a GPU has {device_bytes / 1e9:.1f}{beside}, and libraries need a tenth; "
            f"set {offload}give more GPUs, or lower data.max_response_length"
        )
    return ReplicaRoom(left / device_bytes, left - alone, held + alone)


class _Run:
    """Sizes of a run, from its settings and its model's shape."""

    def __init__(
        self, config: Config, shape: ModelShape, on_cpu: bool, device_bytes: int | None, ranks: int | None = None
    ) -> None:
        """Collect the sizes. ``ranks``: number of the trainer's ranks; None: as placed."""
        self._config, self._shape, self._on_cpu = config, shape, on_cpu
        self.placement: Placement = resolve_placement(config)
        self.context = config.data.max_prompt_length + config.data.max_response_length
        served = config.model.dtype if config.rollout.dtype == "auto" else config.rollout.dtype
        self.served = self._itemsize(served)
        update = config.param_update
        self.on_devices = not on_cpu and between_devices(
            update.transport, update.schedule, update.encoding, config.cluster.backend
        )
        """True if new weights go from the trainer's GPUs to other GPUs."""
        actor = config.actor
        mesh, cp = Mesh(ranks or len(self.placement.devices[ACTOR]), actor.parallel), actor.parallel.cp
        groups = up(actor.ppo_mini_batch_size * actor.parallel.inner, mesh.ranks)  # of a mini-batch, on each data rank
        budget = max(actor.ppo_max_token_len_per_gpu, up(self.context, cp))  # a row is divided only over cp ranks
        self.step = TrainingStep(
            mesh=mesh,
            tokens=min(budget, up(groups * config.rollout.n * self.context, cp)),
            itemsize=self._itemsize(config.model.dtype),
            recompute=config.model.enable_gradient_checkpointing,
            reshard=actor.fsdp_config.reshard_after_forward,
            offload=actor.fsdp_config.param_offload and not on_cpu,
            device_bytes=device_bytes,
            entropy=actor.entropy_coeff > 0,
        )

    def _itemsize(self, dtype: str) -> int:
        return FLOAT if dtype == "float32" or (dtype == "auto" and self._on_cpu) else FLOAT // 2

    def senders(self, ranks: int) -> int:
        """Return the number of the trainer's ranks that send weights to replicas on other devices."""
        config = self._config
        facts = TRANSPORTS[transport_of(config.param_update.transport, backend=config.cluster.backend, shared=False)]
        return 1 if self.on_devices else min(facts.most_senders, ranks // config.actor.parallel.replicate)

    def saved(self, name: str, mesh: Mesh) -> ProcessMemory:
        """Return the memory of the copy for a checkpoint. ``name``: trainer or critic, which has no head."""
        weights = mesh.share(replace(self._shape, tied=True) if name == "critic" else self._shape)
        copy = MemoryItem(f"copy for the {name}'s checkpoint", 3 * FLOAT * weights, on_host=not self._on_cpu)
        if self._config.trainer.save_freq > 0:
            return ProcessMemory((copy,), {})
        return ProcessMemory((), {f"checkpoint of the {name}": (copy,)})  # when training is over

    def trainer(self, *, senders: int) -> ProcessMemory:
        """Return the memory of a training rank. ``senders``: number of sending ranks; 0 if it does not send."""
        config, shape, step, placement = self._config, self._shape, self.step, self.placement
        memory = process_memory.trainer(shape, step).beside(self.saved("trainer", step.mesh))
        if placement.shared(REF, ACTOR):
            memory = memory.beside(process_memory.reference(shape, step))
        if placement.shared(CRITIC, ACTOR):
            memory = memory.beside(process_memory.critic(shape, step)).beside(self.saved("critic", step.mesh))
        if placement.shared(LOGP, ACTOR) and config.async_training.trigger_parameter_sync_step > 1:
            share = FLOAT * step.mesh.share(shape)
            copy = MemoryItem("weights at the version's start", share, on_host=not self._on_cpu)
            now = MemoryItem("the present weights, meanwhile", share, on_host=not self._on_cpu)
            memory = memory.beside(ProcessMemory((copy,), {"log-probs of the version's start": (now,)}))
        sends = process_memory.update(
            shape,
            self.served,
            int(config.rollout.param_update_preduce_bucket_size_mb * MIB),
            senders=senders,
            copy=config.param_update.schedule == "overlapped" or config.param_update.encoding == "delta",
            on_cpu=self._on_cpu,
            through_host=not self._on_cpu and not self.on_devices,
        )
        return memory.beside(sends)

    def own_rank(self, role: str, ranks: int) -> ProcessMemory:
        """Return the memory of each of ``ranks`` ranks of a role with its own ranks."""
        step = replace(self.step, mesh=Mesh(ranks, self.step.mesh.parallel))
        if role != CRITIC:
            return process_memory.reference(self._shape, step)
        return process_memory.critic(self._shape, step).beside(self.saved("critic", step.mesh))

    def replica(self, senders: int, *, cache_bytes: int | None = None) -> ProcessMemory:
        """Return the memory of a replica, or of each device that vLLM divides it over.

        ``cache_bytes``: bytes for keys and values; None: as the settings say.
        """
        shape, rollout, on_cpu, itemsize = self._shape, self._config.rollout, self._on_cpu, self.served
        shared, devices = self._config.cluster.placement == "shared", rollout.tensor_model_parallel_size
        slots, served = concurrent(self._config), shape.served(devices) * itemsize
        if cache_bytes is None and rollout.kv_cache_gib is not None:
            cache_bytes = int(rollout.kv_cache_gib * GIB)
        cache = slots * self.context * shape.cache(itemsize, devices)
        held = [
            MemoryItem("served weights", served),
            MemoryItem("keys and values", cache if cache_bytes is None else min(cache, cache_bytes)),
        ]
        in_place = shared or not rollout.enable_dual_buffer  # updates are received over the served weights
        on_device = rollout.name == "native" and (shared or self.on_devices)  # from a GPU to this one
        if on_device and not in_place:
            held.append(MemoryItem("new weights, beside those that are served", served))
        if on_cpu and shape.family.joined and shape.hidden * shape.intermediate >= process_memory.PACKED_FROM:
            packed = shape.parameters - (0 if shape.tied else shape.embedding)
            held.append(MemoryItem("the weights as a CPU's kernels read them", packed * itemsize))
        # A cut or parked answer is prefilled as a whole; only vLLM on GPUs divides a context over steps.
        undivided = self.context if on_cpu or rollout.name == "native" else 0
        prefill = max(min(rollout.max_batched_tokens, slots * self.context), undivided)
        divided = 2 * (shape.queries + 2 * shape.keys) + 3 * shape.intermediate * max(1, shape.experts_per_token)
        row = 2 * shape.hidden + up(divided, devices)
        bucket = (1 if shared else senders) * int(rollout.param_update_consume_bucket_size_mb * MIB)
        on_host = in_place and not (on_cpu or on_device)
        moments = {
            "prefill": (MemoryItem("a layer of the prompts that are read", prefill * row * itemsize),),
            "sampling": (MemoryItem("logits of a decode step", 3 * slots * shape.vocabulary * FLOAT),),
            "update": (MemoryItem("bucket of an update", min(bucket, served), on_host=on_host),),
        }
        return ProcessMemory(tuple(held), moments)
