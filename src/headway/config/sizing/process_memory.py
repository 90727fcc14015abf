"""Memory of each process of a run, by item. Only arithmetic, without torch, for the doctor and ``--dry-run``.

    trainer rank   held: its shares of weights, gradients and moments (reference, critic)
                   at a time: gathered weights + activations + the moment's buffers; the largest moment counts
    replica        held: served weights, keys and values; at a time: a bucket of an update
    machine        held: one copy of new weights for all its replicas

The moments of a training step follow each other: the log-probs begin the backward pass, each layer follows, and the
embedding ends it. ``benchmarks/memory.py`` compares these numbers with measured peaks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from headway.config.sections.learning import ParallelConfig, replica_problems
from headway.config.sizing.model_shape import FLOAT, ModelShape

CPU_ELEMENTS = 16_777_216
"""Number of logits in a chunk on a CPU: 64 MiB in float32. More are no faster there."""
GPU_SHARE = 32
"""A chunk's logits may take a GPU's memory divided by this; about three such matrices are held at once."""
MOST_TOKENS = 4096
"""Maximum number of tokens in a chunk of logits: more do not make a GPU's matrix products faster."""
PACKED_FROM = 120_000
"""Number of a matrix's weights from which on a replica on a CPU holds a second copy, in its kernels' order. Smaller
matrices stay in the caches, and the call itself costs more."""
INDEX = 8
"""Bytes of a token's id."""


def chunk_tokens(vocabulary: int, device_bytes: int | None) -> int:
    """Return the number of tokens in a chunk of [chunk × vocabulary] float32 logits. ``device_bytes``: the device's
    memory; None for a CPU.

    It depends on the device's whole memory, not on the free part, so that equal devices compute equal chunks.
    """
    elements = CPU_ELEMENTS if device_bytes is None else max(CPU_ELEMENTS, device_bytes // GPU_SHARE // FLOAT)
    return max(1, min(MOST_TOKENS, elements // vocabulary))


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """A named part of a process's memory."""

    name: str
    nbytes: int
    on_host: bool = False
    """True if it is in host memory while the process computes on another device."""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Memory of one process: items held all the time, and additional items at certain moments."""

    held: tuple[MemoryItem, ...]
    moments: Mapping[str, tuple[MemoryItem, ...]]

    @property
    def busiest(self) -> str | None:
        """Name of the moment with the most device memory; None without moments."""
        return max(self.moments, key=lambda name: _sum(self.moments[name], on_host=False), default=None)

    @property
    def lines(self) -> tuple[MemoryItem, ...]:
        """Items held permanently and at the busiest moment."""
        return self.held + (() if self.busiest is None else self.moments[self.busiest])

    @property
    def device(self) -> int:
        """Maximum bytes of device memory."""
        return _sum(self.lines, on_host=False)

    @property
    def host(self) -> int:
        """Maximum bytes of host memory, of items that are `on_host`."""
        others = [_sum(lines, on_host=True) for lines in self.moments.values()]
        return _sum(self.held, on_host=True) + max(others, default=0)

    def beside(self, other: ProcessMemory) -> ProcessMemory:
        """Return the memory of both in one process, whose moments do not coincide."""
        return ProcessMemory(self.held + other.held, {**self.moments, **other.moments})


@dataclass(frozen=True, slots=True)
class Mesh:
    """A role's ranks, and the division of a model over them."""

    ranks: int
    parallel: ParallelConfig

    def share(self, shape: ModelShape) -> int:
        """Number of the model's parameters on each rank."""
        # `copy`: number of ranks that hold one copy of the model together.
        parallel, copy = self.parallel, self.ranks // self.parallel.replicate
        dense = shape.layers * (up(shape.divided, parallel.tp) + shape.kept) + self.root(shape)
        return up(dense, copy // parallel.tp) + up(shape.layers * shape.of_experts, copy)

    def root(self, shape: ModelShape) -> int:
        """Number of parameters that stay gathered on each rank in a step: embedding, last norm and head."""
        return up(shape.embedding, self.parallel.tp) + shape.final + up(shape.head, self.parallel.tp)

    def layer(self, shape: ModelShape) -> int:
        """Number of parameters of a gathered layer on each rank."""
        parallel = self.parallel
        return up(shape.divided, parallel.tp) + shape.kept + up(shape.of_experts, max(parallel.tp, parallel.ep))

    def vocabulary(self, shape: ModelShape) -> int:
        """Number of vocabulary entries whose logits each rank computes."""
        return up(shape.vocabulary, self.parallel.tp)


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """A training step on each rank."""

    mesh: Mesh
    tokens: int
    """Maximum number of a micro-batch's tokens that the rank computes; all may be tokens of answers."""
    itemsize: int
    """Bytes of one number in the compute dtype."""
    recompute: bool = False
    """``model.enable_gradient_checkpointing``"""
    reshard: bool = True
    """``actor.fsdp_config.reshard_after_forward``"""
    offload: bool = False
    """``actor.fsdp_config.param_offload``, on a device other than the CPU."""
    device_bytes: int | None = None
    """Memory of the device; None for a CPU."""
    entropy: bool = False
    """True if the loss has an entropy term."""


def trainer(shape: ModelShape, step: TrainingStep) -> ProcessMemory:
    """Memory of a rank that trains the policy."""
    share = FLOAT * step.mesh.share(shape)
    held = (
        MemoryItem("weights, float32", share, step.offload),
        MemoryItem("gradients, float32", share, step.offload),
        MemoryItem("two moments, float32", 2 * share, step.offload),
    )
    return ProcessMemory(held, _moments(shape, step))


def reference(shape: ModelShape, step: TrainingStep) -> ProcessMemory:
    """Memory of a rank of the reference policy, or of one that recomputes log-probs: only forward passes."""
    mesh, c = step.mesh, step.itemsize
    forward = (
        MemoryItem("gathered embedding and head", c * mesh.root(shape)),
        MemoryItem("gathered layers: two at a time", 2 * c * mesh.layer(shape)),
        MemoryItem("activations of one layer", step.tokens * _passing(shape, step)),
        MemoryItem("logits of a chunk", 3 * _chunk(shape, step)),
    )
    return ProcessMemory(
        (MemoryItem("weights of the reference", c * mesh.share(shape), step.offload),), {"log-probs": forward}
    )


def critic(shape: ModelShape, step: TrainingStep) -> ProcessMemory:
    """Memory of a rank that trains the critic: a decoder without a head."""
    share = FLOAT * step.mesh.share(replace(shape, tied=True))
    held = MemoryItem("weights and moments of the critic", 3 * share, step.offload)
    gradients = MemoryItem("gradients of the critic", share, step.offload)
    parts = _moments(replace(shape, tied=True), step, headless=True)
    moments = {f"{name} of the critic": (gradients, *lines) for name, lines in parts.items()}
    return ProcessMemory((held,), moments)


def update(
    shape: ModelShape, itemsize: int, bucket: int, *, senders: int, copy: bool, on_cpu: bool, through_host: bool = False
) -> ProcessMemory:
    """Memory of an update on a trainer rank. ``senders``: number of sending ranks; 0 for a rank that does not send.

    ``copy``: a copy of the sent weights is kept (overlapped, or deltas). ``through_host``: a GPU's buckets are sent
    from host memory.
    """
    share = up(shape.parameters * itemsize, max(1, senders))
    bucket = min(bucket, share)
    lines = [MemoryItem("bucket of an update", bucket)]
    if senders > 1:
        lines.append(MemoryItem("bucket of another rank", bucket))
    if senders and through_host and not copy:
        lines.append(MemoryItem("the bucket in host memory", bucket, on_host=True))
    held = (MemoryItem("copy of what is sent", share, on_host=not on_cpu),) if copy and senders else ()
    return ProcessMemory(held, {"update": tuple(lines)})


# ------------------------------------------------------------------------------------------ a training step


def activations(shape: ModelShape, step: TrainingStep) -> int:
    """Bytes that a micro-batch's forward pass saves for its backward pass."""
    c = step.itemsize
    ends = INDEX + 2 * c * shape.head_dim + shape.saved_by_norm(c) + 5 * FLOAT
    layer = c * shape.hidden if step.recompute else shape.saved_by_layer(c, step.mesh.parallel.tp)
    return step.tokens * (ends + shape.layers * layer)


def _moments(shape: ModelShape, step: TrainingStep, *, headless: bool = False) -> dict[str, tuple[MemoryItem, ...]]:
    """Return moment of a step → its items. ``headless``: True for a decoder whose head has one output."""
    mesh, c = step.mesh, step.itemsize
    layer, root = mesh.layer(shape), mesh.root(shape)
    own_embedding = mesh.vocabulary(shape) * shape.hidden
    own_head = 0 if headless else own_embedding
    gathered = MemoryItem("gathered embedding and head", c * root)
    kept_layers = 0 if step.reshard else shape.layers * c * layer
    saved = MemoryItem("activations", activations(shape, step))
    of_layer = step.tokens * shape.saved_by_layer(c, mesh.parallel.tp)
    # A layer's saved activations are freed during its backward pass; with recomputation they did not exist before.
    last, within = (0, of_layer) if step.recompute else (of_layer, step.tokens * _passing(shape, step))
    logits = 0 if headless else _chunk(shape, step)
    hidden = MemoryItem("gradient of the hidden states", step.tokens * c * shape.hidden)
    two = MemoryItem("gathered layers: two at a time", max(kept_layers, 2 * c * layer))
    return {
        "log-probs": (gathered, two, saved, MemoryItem("logits of a chunk", 3 * logits)),
        "backward pass of the head": (
            gathered,
            MemoryItem("gathered layer", max(kept_layers, c * layer)),
            saved,
            hidden,
            MemoryItem("logits of a chunk", (3 if step.entropy else 2) * logits),
            MemoryItem("gradient of the head, and a chunk's", (FLOAT + c) * own_head),
        ),
        "backward pass of a layer": (
            gathered,
            two,
            replace(saved, nbytes=saved.nbytes - last),
            hidden,
            MemoryItem("gradient of the head", c * own_head),
            MemoryItem("a layer's gradients, and sums over ranks", (c + FLOAT) * layer),
            MemoryItem("a layer in work", within),
        ),
        "backward pass of the embedding": (
            gathered,
            MemoryItem("gradients of embedding and head", c * (own_embedding + own_head)),
            MemoryItem("a layer's sums over ranks", FLOAT * layer),
        ),
        "sum of the last gradients over ranks": (
            MemoryItem("gradients of embedding and head", c * root),
            MemoryItem("the same, summed over ranks in float32", FLOAT * root),
        ),
    }


def _passing(shape: ModelShape, step: TrainingStep) -> int:
    """Temporary bytes per token while a layer is computed."""
    tp, chosen = step.mesh.parallel.tp, max(1, shape.experts_per_token)
    return step.itemsize * (2 * shape.hidden + 2 * chosen * shape.intermediate // tp)


def _chunk(shape: ModelShape, step: TrainingStep) -> int:
    """Bytes of a chunk's logits in float32."""
    vocabulary = step.mesh.vocabulary(shape)
    return min(step.tokens, chunk_tokens(vocabulary, step.device_bytes)) * vocabulary * FLOAT


def _sum(lines: Sequence[MemoryItem], *, on_host: bool) -> int:
    return sum(line.nbytes for line in lines if line.on_host is on_host)


def up(number: int, parts: int) -> int:
    """Return the largest of so many equal parts."""
    return -(-number // parts)


PER_MACHINE = 8
"""Devices of a machine."""
SIZES = (1, 2, 4, 8)
"""Numbers of devices that a vLLM replica may have, the cheapest first."""
MANY = 8
"""Number of concurrent whole answers below which a replica gets more devices, if it may."""
SAMPLED = 64
"""Number of answers for which a decode step is planned."""
BUDGETS = (32_768, 16_384, 8192)
"""Sizes of a micro-batch that are tried, in tokens, beside that of one longest answer."""
BUCKET = 64 * 2**20
BF16 = 2


def room(device_bytes: int) -> int:
    """Return the usable bytes of a device. Libraries, communication and fragmentation take the rest."""
    return device_bytes * 9 // 10


@dataclass(frozen=True, slots=True)
class Split:
    """Numbers of devices that train and that generate."""

    train: int
    generate: int
    """Number of devices that only generate; 0 if the training devices also generate."""
    replicas: tuple[int, ...] = (1,)
    """Numbers of devices that a replica may have, in order of preference."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A layout that fits: training ranks with mesh and micro-batches, and replicas."""

    shared: bool
    """True if the same devices train and generate."""
    step: TrainingStep
    memory: ProcessMemory
    """Memory of a rank while it trains."""
    replica: int
    """Number of devices of a replica."""
    answers: int
    """Number of whole answers whose keys and values fit into a replica; 0 if the replica itself does not fit."""


def fits(
    shape: ModelShape, splits: Iterable[Split], context: int, device_bytes: int, budgets: tuple[int, ...] = BUDGETS
) -> Iterator[Fit]:
    """Yield layouts that fit, the cheapest first, for prompts and answers of ``context`` tokens together.

    ``splits`` are tried in their order.
    """
    most = room(device_bytes)
    for split in splits:
        shared, alone = split.generate == 0, replicas(shape, most, context, split)
        for step in _steps(shape, split.train, context, device_bytes, budgets):
            memory = trainer(shape, step).beside(update(shape, BF16, BUCKET, senders=1, copy=False, on_cpu=False))
            replica, answers = alone
            if shared:
                held = sum(line.nbytes for line in memory.held if not line.on_host)
                replica, answers = replicas(shape, most - held, context, split)
            if memory.device <= most and (answers or not alone[1]):
                yield Fit(shared, step, memory, replica, answers)


def replicas(shape: ModelShape, nbytes: int, context: int, split: Split) -> tuple[int, int]:
    """Return the number of a replica's devices, and of whole answers that fit, with ``nbytes`` on each device.

    Chooses the first size with room for `MANY` answers, else the last size with room for any.
    """
    heads, devices = {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads}, split.generate
    sizes = [size for size in split.replicas if devices % size == 0 and not any(replica_problems(size, heads))]
    found = [(size, whole_answers(shape, nbytes, context, size)) for size in sizes]
    able = [(size, answers) for size, answers in found if answers]
    return next((one for one in able if one[1] >= MANY), able[-1] if able else (1, 0))


def whole_answers(shape: ModelShape, nbytes: int, context: int, devices: int = 1) -> int:
    """Return the number of whole answers that fit beside the served weights and a step's logits, with ``nbytes`` on
    each of a replica's ``devices``.
    """
    left = nbytes - BF16 * shape.served(devices) - 3 * SAMPLED * shape.vocabulary * FLOAT
    return max(0, left // (context * shape.cache(BF16, devices)))


def _steps(
    shape: ModelShape, ranks: int, context: int, device_bytes: int, budgets: tuple[int, ...]
) -> Iterator[TrainingStep]:
    """Yield training steps on so many devices, the cheapest first."""
    within = min(ranks, PER_MACHINE)
    inner = [(tp, cp) for tp, cp in product((1, 2, 4, 8), repeat=2) if tp * cp <= within and shape.kv_heads % tp == 0]
    inner.sort(key=lambda sizes: (sizes[0] * sizes[1], sizes[0]))
    experts = (within, 1) if shape.experts else (1,)
    copies = (ranks // PER_MACHINE, 1) if ranks > PER_MACHINE else (1,)
    # `product` varies the last factor first: offloading, which costs most, comes after all others.
    for offload, (tp, cp), recompute, replicate, ep in product((False, True), inner, (False, True), copies, experts):
        least = -(-context // cp)
        for budget in (*(budget for budget in budgets if budget > least), least):
            yield TrainingStep(
                mesh=Mesh(ranks, ParallelConfig(replicate=replicate, tp=tp, cp=cp, ep=ep)),
                tokens=budget,
                itemsize=BF16,
                recompute=recompute,
                offload=offload,
                device_bytes=device_bytes,
            )
