"""Devices and mesh of trainer and rollout: the first layout that fits in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from headway.api.init.model_summary import Machine, ModelFacts
from headway.config.presets import preset
from headway.config.sections.learning import expert_problems, model_problems, plan_problems
from headway.config.sizing.model_shape import FAMILIES
from headway.config.sizing.process_memory import PER_MACHINE, SIZES, Fit, Split, fits, replicas, room
from headway.errors import ConfigError
from headway.models.tokenizer import torch_hidden

BUDGETS = (16_384, 8192)
"""Tokens of a micro-batch that are tried: more make a step no faster."""
ON_CPU = 4096
"""The same on CPUs."""
MOST_GPUS = 1024
WHY_MESH = {
    "replicate": "copies of the sharded model: layers are gathered within machines",
    "tp": "ranks that divide each layer's matrices",
    "cp": "ranks that divide each line of tokens",
    "ep": "ranks that divide the experts",
}
ASYNC, TURNS = "async_partial", "colocate_async"
REPLICA_SIZE = "rollout.tensor_model_parallel_size"


@dataclass(frozen=True, slots=True)
class DeviceLayout:
    """Roles on devices. ``trainer`` and ``rollout``: machines, and devices on each."""

    mode: str
    why_mode: str
    trainer: tuple[int, int]
    rollout: tuple[int, int]
    tokens: int
    why_tokens: str
    engine: str
    why_engine: str
    why_trainer: str = ""
    why_rollout: str = ""
    recompute: bool = False
    offload: bool = False
    mesh: Mapping[str, int] = field(default_factory=dict)
    replica: int = 1
    """Devices of a replica."""
    inline: bool = False

    why_offload: str = ""

    @property
    def data_ranks(self) -> int:
        """Training ranks, or inner meshes, that have rows of their own."""
        ranks = self.trainer[0] * self.trainer[1]
        return ranks // (self.mesh.get("tp", 1) * self.mesh.get("cp", 1))


def layout_of(model: ModelFacts, machine: Machine, context: int, given: Mapping[str, Any]) -> DeviceLayout:
    """Return the layout for prompts and answers of ``context`` tokens together.

    Raises:
        ConfigError: no layout fits; says how many devices would do.
    """
    mode = given.get("mode")
    kind = given.get("cluster.placement", None if mode is None else preset(mode)["cluster.placement"])
    shared = None if kind is None else kind == "shared"
    if machine.on_cpu:
        return _on_cpu(machine, context, mode, shared=bool(shared))
    sizes = _replica_sizes(machine, given)
    trains = None if shared else _asked(machine, given)
    found = _first(model, machine, machine.gpus, context, sizes, shared, trains)
    if found is None:
        raise ConfigError(_does_not_fit(model, machine, context, sizes, shared, trains))
    return _on_gpus(model, machine, found, mode)


def _replica_sizes(machine: Machine, given: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the numbers of GPUs that a replica may have: as given, or several where vLLM is or may be installed."""
    if REPLICA_SIZE in given:
        return (int(given[REPLICA_SIZE]),)
    engine = given.get("rollout.name", "native" if machine.here and not machine.vllm else "vllm")
    return SIZES if engine == "vllm" else (1,)


def _on_cpu(machine: Machine, context: int, mode: str | None, *, shared: bool) -> DeviceLayout:
    one = machine.cores == 1
    why = "training and generation side by side" if not shared else "they take turns in one process"
    return DeviceLayout(
        mode=mode or (TURNS if shared else ASYNC),
        why_mode=why if mode is None else "as given",
        trainer=(1, 1),
        rollout=(1, 1),
        tokens=max(ON_CPU, context),
        why_tokens="tokens of a micro-batch",
        engine="native",
        why_engine="Headway's own; vLLM is for GPUs",
        why_trainer="a process that trains",
        why_rollout="the same process" if shared else "a process that generates",
        inline=one,
    )


def _on_gpus(model: ModelFacts, machine: Machine, fit: Fit, mode: str | None) -> DeviceLayout:
    step, gpus = fit.step, machine.gpus
    trains = step.mesh.ranks
    generates = gpus if fit.shared else gpus - trains
    if mode is not None:
        why = "as given"
    elif fit.shared:
        why = "training and generation take turns: " + ("there is one GPU" if gpus == 1 else "apart they do not fit")
    else:
        why = "training and generation side by side"
    vllm = (machine.vllm or fit.replica > 1) and not fit.shared
    engine = "it is installed here" if vllm else "Headway's own; vllm, where that is installed"
    if machine.vllm and fit.shared:
        engine = "it shares GPUs with the trainer"
    elif not machine.vllm and vllm:
        engine = "replicas of several GPUs are its own; install it on those machines"
    takes = f"a rank takes at most {max(1, fit.memory.device / 1e9):.0f} of {machine.device_bytes / 1e9:.0f} GB"
    if model.estimated:
        takes += ", by the arithmetic of a Llama of its size"
    each = "each" if fit.replica == 1 else f"each {fit.replica}"
    sizes = {name: size for name, size in step.mesh.parallel.model_dump().items() if size > 1}
    return DeviceLayout(
        mode=mode or (TURNS if fit.shared else ASYNC),
        why_mode=why,
        trainer=_machines(trains),
        rollout=_machines(generates),
        tokens=step.tokens,
        why_tokens=f"tokens of a micro-batch; {takes}",
        engine="vllm" if vllm else "native",
        why_engine=engine,
        why_trainer="GPUs that train" + ("" if fit.shared else "; headway plan finds a better split after a short run"),
        why_rollout="the same GPUs" if fit.shared else f"GPUs that generate, {model.size} parameters on {each}",
        recompute=step.recompute,
        offload=step.offload,
        why_offload=f"they do not fit on the GPUs: {_on_host(fit) / 1e9:.0f} GB of each machine's memory",
        mesh=sizes,
        replica=fit.replica,
    )


# ------------------------------------------------------------------------------------------ what fits


def _first(
    model: ModelFacts,
    machine: Machine,
    gpus: int,
    context: int,
    sizes: tuple[int, ...],
    shared: bool | None,
    trains: int | None = None,
) -> Fit | None:
    """Return the first layout that fits: a quarter of the GPUs train where they can do it without further ado, else
    half of them, or fewer that leave whole replicas, else all of them take turns.

    ``sizes``: GPUs that a replica may have. ``shared``: whether they have to take turns; None: as it comes.
    ``trains``: how many the user wants to train.
    """
    shape, device_bytes = model.shape, machine.device_bytes
    unit, count = (PER_MACHINE, gpus // PER_MACHINE) if gpus > PER_MACHINE else (1, gpus)

    def apart(trains: int) -> Split:
        return Split(trains, gpus - trains, sizes)

    quarter, half = ([apart(unit * part)] if part and not shared else [] for part in (count // 4, count // 2))
    if half:
        rests = {gpus - -(-half[0].generate // size) * size for size in sizes} - {half[0].train}
        half += [apart(rest) for rest in sorted(rests, reverse=True) if rest > 0]
    turns = [Split(gpus, 0)] if shared is not False else []
    if trains is not None:
        quarter, half, turns = [], [apart(trains)], []
    plainly = (fit for fit in fits(shape, quarter, context, device_bytes, BUDGETS) if _is_plain(fit))
    others = fits(shape, [*half, *turns], context, device_bytes, BUDGETS)
    found = (fit for fit in chain(plainly, others) if fit.answers and not any(_problems(model, fit)))
    return next((fit for fit in found if machine.host_bytes is None or _on_host(fit) <= room(machine.host_bytes)), None)


def _asked(machine: Machine, given: Mapping[str, Any]) -> int | None:
    """Return the GPUs that train, where the user says it of them or of those that generate; None where neither.

    Raises:
        ConfigError: none are left for the others.
    """
    for role, others in (("trainer", "rollout"), ("rollout", "trainer")):
        if not any(f"{role}.{key}" in given for key in ("nnodes", "n_gpus_per_node")):
            continue
        nodes = int(given.get(f"{role}.nnodes", 1))
        count = nodes * int(given.get(f"{role}.n_gpus_per_node", PER_MACHINE if nodes > 1 else 1))
        if not 0 < count < machine.gpus:
            raise ConfigError(
                f"{role}.nnodes × {role}.n_gpus_per_node is {count} of {machine.gpus} GPUs, and {others} needs at "
                "least one; give --gpus N, the number of all"
            )
        left = machine.gpus - count
        if bad := next((n for n in (count, left) if n > PER_MACHINE and n % PER_MACHINE), None):
            raise ConfigError(
                f"{role}.nnodes × {role}.n_gpus_per_node is {count} of {machine.gpus} GPUs, which leaves {left} for "
                f"{others}: {bad} are no whole machines of {PER_MACHINE}; give whole machines, {role}.nnodes=1 "
                f"{role}.n_gpus_per_node={PER_MACHINE}, or another --gpus"
            )
        return count if role == "trainer" else left
    return None


def _on_host(fit: Fit) -> int:
    """Return the bytes that the trainer's ranks of one machine keep in its memory."""
    return fit.memory.host * min(fit.step.mesh.ranks, PER_MACHINE)


def _is_plain(fit: Fit) -> bool:
    step = fit.step
    return not step.recompute and not step.offload and step.mesh.parallel.inner == 1


def _problems(model: ModelFacts, fit: Fit) -> Iterator[str]:
    """Yield the reasons against this division."""
    parallel, ranks = fit.step.mesh.parallel, fit.step.mesh.ranks
    nodes, each = _machines(ranks)
    yield from parallel.problems(nodes, each, "the trainer")
    yield from model_problems(parallel, model.config)
    yield from expert_problems(parallel, model.config, {"the trainer": ranks})
    if parallel.cp > 1 and model.family not in FAMILIES:
        yield "only a trial would tell whether its rows can be packed"
    if parallel.tp > 1 or parallel.ep > 1:
        with torch_hidden():
            from transformers.models.auto.configuration_auto import CONFIG_MAPPING

            if model.family in CONFIG_MAPPING:
                yield from plan_problems(parallel, CONFIG_MAPPING[model.family])


def _does_not_fit(
    model: ModelFacts,
    machine: Machine,
    context: int,
    sizes: tuple[int, ...],
    shared: bool | None,
    trains: int | None,
) -> str:
    each, size = machine.device_bytes, f"{machine.device_bytes / 1e9:.0f} GB"
    start = f"{model.path} has {model.size} parameters, and its longest prompts with answers have {context} tokens: "
    if not replicas(model.shape, room(each), context, Split(1, max(sizes), (1,) if shared else sizes))[1]:
        several = max(sizes) > 1 and not shared
        has = f"a replica has at most {max(sizes)} GPUs" if several else "a replica is one GPU"
        others = "Give" if several or shared else "Take rollout.name=vllm, whose replicas may have several, or give"
        return (
            f"{start}{has}, and {size}{' each' if several else ''} have no room for the weights in bfloat16 and one "
            f"such answer. {others} GPUs with more memory (--gpu-gb), a smaller model, or a smaller "
            "data.max_response_length"
        )
    start += f"they do not fit on {machine.words}"
    if trains is not None:
        start += f", of which {trains} train"
        if (other := _first(model, machine, machine.gpus, context, sizes, shared)) is not None:
            return f"{start}. With {other.step.mesh.ranks} that train they do: leave the division out"
    start += ". "
    more = (gpus for gpus in _numbers() if gpus > machine.gpus)
    enough = next((gpus for gpus in more if _first(model, machine, gpus, context, sizes, shared) is not None), None)
    if enough is None:
        return f"{start}Give a smaller model, or a smaller data.max_response_length"
    return f"{start}{enough} GPUs of {size} would do (--gpus {enough}); or give a smaller data.max_response_length"


def _numbers() -> Iterator[int]:
    gpus = 1
    while gpus <= MOST_GPUS:
        yield gpus
        gpus *= 2


def _machines(devices: int) -> tuple[int, int]:
    """Return machines, and devices on each."""
    return (1, devices) if devices <= PER_MACHINE else (devices // PER_MACHINE, PER_MACHINE)
