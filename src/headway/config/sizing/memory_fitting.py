"""Settings that fit a model into the memory of given devices, in the order of what they cost.

    apart ─▶ shared          weights on the device ─▶ on the host          small inner meshes ─▶ large ones
    without ─▶ with recomputation          copies of the sharded model within machines ─▶ one over all

Replicas are as small as have room for some answers. Arithmetic alone, that of `headway.config.sizing.process_memory`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from headway.config.sections.parallel import ParallelConfig, replica_problems
from headway.config.sizing.model_shape import FLOAT, ModelShape
from headway.config.sizing.process_memory import Mesh, ProcessMemory, TrainingStep, trainer, update

PER_MACHINE = 8
"""Devices of a machine."""
SIZES = (1, 2, 4, 8)
"""Numbers of devices that a replica of vLLM's may have, in the order of what they cost."""
MANY = 8
"""Whole answers at once, for fewer of which a replica gets more devices, where it can have them."""
SAMPLED = 64
"""Answers that a decode step is planned for."""
BUDGETS = (32_768, 16_384, 8192)
"""Tokens of a micro-batch that are tried, those of one longest answer beside them."""
BUCKET = 64 * 2**20
BF16 = 2


def room(device_bytes: int) -> int:
    """Return the bytes of a device that are planned with: libraries, communication and gaps take the others."""
    return device_bytes * 9 // 10


@dataclass(frozen=True, slots=True)
class Split:
    """Devices that train, and devices that generate."""

    train: int
    generate: int
    """Number of devices of their own; 0 where those that train generate, too."""
    replicas: tuple[int, ...] = (1,)
    """Numbers of devices that a replica may have, in the order of preference."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Training ranks, their mesh and micro-batches, and replicas, that fit."""

    shared: bool
    """True where the same devices generate."""
    step: TrainingStep
    memory: ProcessMemory
    """Memory of a rank while it trains."""
    replica: int
    """Devices of a replica."""
    answers: int
    """Whole answers whose keys and values a replica has room for; 0 where it does not fit."""


def fits(
    shape: ModelShape, splits: Iterable[Split], context: int, device_bytes: int, budgets: tuple[int, ...] = BUDGETS
) -> Iterator[Fit]:
    """Yield what fits, the cheapest first, for prompts and answers of ``context`` tokens together.

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
    """Return the devices of a replica, and the whole answers that it has room for, with ``nbytes`` on each device.

    The first size that has room for `MANY`; else the last that has for any.
    """
    heads, devices = {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads}, split.generate
    sizes = [size for size in split.replicas if devices % size == 0 and not any(replica_problems(size, heads))]
    found = [(size, whole_answers(shape, nbytes, context, size)) for size in sizes]
    able = [(size, answers) for size, answers in found if answers]
    return next((one for one in able if one[1] >= MANY), able[-1] if able else (1, 0))


def whole_answers(shape: ModelShape, nbytes: int, context: int, devices: int = 1) -> int:
    """Return how many whole answers have room beside the served weights, and the logits of a step, in ``nbytes`` on
    each of a replica's ``devices``.
    """
    left = nbytes - BF16 * shape.served(devices) - 3 * SAMPLED * shape.vocabulary * FLOAT
    return max(0, left // (context * shape.cache(BF16, devices)))


def _steps(
    shape: ModelShape, ranks: int, context: int, device_bytes: int, budgets: tuple[int, ...]
) -> Iterator[TrainingStep]:
    """Yield training steps on so many devices, in the order of what they cost."""
    within = min(ranks, PER_MACHINE)
    inner = [(tp, cp) for tp, cp in product((1, 2, 4, 8), repeat=2) if tp * cp <= within and shape.kv_heads % tp == 0]
    inner.sort(key=lambda sizes: (sizes[0] * sizes[1], sizes[0]))
    experts = (within, 1) if shape.experts else (1,)
    copies = (ranks // PER_MACHINE, 1) if ranks > PER_MACHINE else (1,)
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
