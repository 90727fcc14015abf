"""Devices and mesh of trainer and rollout: the first layout that fits in memory, and what is left for keys and values.

The layout is chosen for training; then the memory of the configured run is added up, with its slots and buffers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from headway.api.init.model_summary import SMALL, Machine, ModelFacts
from headway.config.layers import Layer
from headway.config.loading import load
from headway.config.presets import preset
from headway.config.schema import Config
from headway.config.sections.learning import expert_problems, model_problems, plan_problems
from headway.config.sizing.model_shape import FAMILIES, FLOAT
from headway.config.sizing.process_memory import BF16, PER_MACHINE, SIZES, Fit, MemoryItem, Split, fits, replicas, room
from headway.config.sizing.run_memory import GIB, OF_REPLICA, REPLICA, RunProcess, processes
from headway.devices import ACCELERATORS, CPU
from headway.errors import ConfigError
from headway.models.tokenizer import torch_hidden

GIVEN = "as given"


@dataclass(frozen=True, slots=True)
class Choice:
    """A setting, its value and the reason for it."""

    key: str
    value: Any
    reason: str = ""


class Choices:
    """Choices so far. A setting that the user gave is never replaced."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given
        """The user's settings: dotted key → value."""
        self._made: dict[str, Choice] = {}

    def add(self, key: str, value: Any, reason: str = "") -> Any:
        """Choose ``value`` unless the user gave ``key``. Returns the value in effect."""
        if key in self.given:
            value, reason = self.given[key], GIVEN
        self._made[key] = Choice(key, value, reason)
        return value

    def finished(self) -> list[Choice]:
        """Return all choices, and the user's settings that no choice was made for."""
        others = [Choice(key, value, GIVEN) for key, value in self.given.items() if key not in self._made]
        return [*self._made.values(), *others]


TRIED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Numbers of GPUs that are tried for the message that no layout fits."""
BUDGETS = (16_384, 8192)
"""Sizes of a micro-batch that are tried, in tokens: larger ones make a step no faster."""
ON_CPU = 4096
"""Tokens of a micro-batch on CPUs."""
WHY_MESH = {
    "replicate": "copies of the sharded model: layers are gathered within machines",
    "tp": "ranks that divide each layer's matrices",
    "cp": "ranks that divide each line of tokens",
    "ep": "ranks that divide the experts",
}
ASYNC, TURNS = "async_partial", "colocate_async"
REPLICA_SIZE = "rollout.tensor_model_parallel_size"


def choose_devices(made: Choices, model: ModelFacts, machine: Machine, context: int) -> tuple[str, int]:
    """Choose mode, devices, mesh and engine for prompts and answers of ``context`` tokens together.

    Returns the mode, and the number of data ranks: training ranks, or inner meshes, with different rows.

    Raises:
        ConfigError: no layout fits; the message says how many devices would do.
    """
    given, mode = made.given, made.given.get("mode")
    kind = given.get("cluster.placement", None if mode is None else preset(mode)["cluster.placement"])
    shared = None if kind is None else kind == "shared"
    if machine.on_cpu:
        return _on_cpu(made, model, machine, context, shared=bool(shared)), 1
    trains = None if shared else _asked(machine, given)
    layouts = _Layouts(model, machine, context, _replica_sizes(machine, given), shared, trains)
    if (fit := layouts.first(machine.gpus)) is None:
        raise ConfigError(layouts.does_not_fit())
    mesh = fit.step.mesh
    return _on_gpus(made, model, machine, fit), mesh.ranks // mesh.parallel.inner


def _replica_sizes(machine: Machine, given: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the numbers of GPUs that a replica may have: the given one, or several if vLLM is or may be installed."""
    if REPLICA_SIZE in given:
        return (int(given[REPLICA_SIZE]),)
    engine = given.get("rollout.name", "native" if machine.here and not machine.vllm else "vllm")
    return SIZES if engine == "vllm" else (1,)


def _on_cpu(made: Choices, model: ModelFacts, machine: Machine, context: int, *, shared: bool) -> str:
    why = "they take turns in one process" if shared else "training and generation side by side"
    mode = str(made.add("mode", TURNS if shared else ASYNC, why))
    made.add("rollout.name", "native", "Headway's own; vLLM is for GPUs")
    made.add("actor.ppo_max_token_len_per_gpu", max(ON_CPU, context), "tokens of a micro-batch")
    made.add("trainer.n_gpus_per_node", 1, "a process that trains")
    made.add("rollout.n_gpus_per_node", 1, "the same process" if shared else "a process that generates")
    slow = f"; slow for {model.size} parameters" if model.shape.parameters >= SMALL else ""
    made.add("cluster.device", CPU.name, machine.words + slow)
    if machine.cores == 1:
        made.add("cluster.backend", "inline", "one process does it all: there is one core")
    return mode


def _on_gpus(made: Choices, model: ModelFacts, machine: Machine, fit: Fit) -> str:
    step, gpus, trains = fit.step, machine.gpus, fit.step.mesh.ranks
    if fit.shared:
        why = "training and generation take turns: " + ("there is one GPU" if gpus == 1 else "apart they do not fit")
    else:
        why = "training and generation side by side"
    mode = str(made.add("mode", TURNS if fit.shared else ASYNC, why))
    if step.recompute:
        made.add(RECOMPUTE, True, WHY_RECOMPUTE)
    vllm = (machine.vllm or fit.replica > 1) and not fit.shared
    engine = "it is installed here" if vllm else "Headway's own; vllm, where that is installed"
    if machine.vllm and fit.shared:
        engine = "it shares GPUs with the trainer"
    elif not machine.vllm and vllm:
        engine = "replicas of several GPUs are its own; install it on those machines"
    made.add("rollout.name", "vllm" if vllm else "native", engine)
    takes = f"a rank takes at most {max(1, fit.memory.device / 1e9):.0f} of {machine.device_bytes / 1e9:.0f} GB"
    if model.estimated:
        takes += ", by the arithmetic of a Llama of its size"
    made.add("actor.ppo_max_token_len_per_gpu", step.tokens, f"tokens of a micro-batch; {takes}")
    for name, size in step.mesh.parallel:
        if size > 1:
            made.add(f"actor.parallel.{name}", size, WHY_MESH[name])
    if step.offload:
        why = f"they do not fit on the GPUs: {_on_host(fit) / 1e9:.0f} GB of each machine's memory"
        made.add("actor.fsdp_config.param_offload", True, why)
    each = "each" if fit.replica == 1 else f"each {fit.replica}"
    better = "" if fit.shared else "; headway plan finds a better split after a short run"
    generate = "the same GPUs" if fit.shared else f"GPUs that generate, {model.size} parameters on {each}"
    for role, devices, why in (
        ("trainer", trains, f"GPUs that train{better}"),
        ("rollout", gpus if fit.shared else gpus - trains, generate),
    ):
        nodes, on_each = _machines(devices)
        if nodes > 1:
            made.add(f"{role}.nnodes", nodes, f"machines of {PER_MACHINE}")
        made.add(f"{role}.n_gpus_per_node", on_each, why)
    if fit.replica > 1:
        made.add(REPLICA_SIZE, fit.replica, "GPUs of one replica")
    made.add("cluster.device", ACCELERATORS[0].name, machine.words)
    if machine.nodes > 1:
        made.add("cluster.address", "auto", "a Ray cluster of these machines, joined from one of them")
    return mode


# ------------------------------------------------------------------------------------------ what fits


@dataclass(frozen=True, slots=True)
class _Layouts:
    """Candidate layouts for prompts and answers of ``context`` tokens together."""

    model: ModelFacts
    machine: Machine
    context: int
    sizes: tuple[int, ...]
    """Numbers of GPUs that a replica may have."""
    shared: bool | None
    """True if training and generation must take turns, False if they must not; None: either."""
    trains: int | None
    """Number of training GPUs that the user wants; None: any."""

    def first(self, gpus: int) -> Fit | None:
        """Return the first layout that fits. Tried in order: a quarter of the GPUs train, without memory savers and
        inner mesh; half of them, or fewer that leave whole replicas; all of them take turns.
        """
        unit, count = (PER_MACHINE, gpus // PER_MACHINE) if gpus > PER_MACHINE else (1, gpus)

        def apart(trains: int) -> Split:
            return Split(trains, gpus - trains, self.sizes)

        quarter, half = ([apart(unit * part)] if part and not self.shared else [] for part in (count // 4, count // 2))
        if half:
            rests = {gpus - -(-half[0].generate // size) * size for size in self.sizes} - {half[0].train}
            half += [apart(rest) for rest in sorted(rests, reverse=True) if rest > 0]
        turns = [Split(gpus, 0)] if self.shared is not False else []
        if self.trains is not None:
            quarter, half, turns = [], [apart(self.trains)], []
        # Generators: a layout's memory is computed only if no earlier one fits.
        plainly, others = self._fits(quarter), self._fits([*half, *turns])
        found = chain((fit for fit in plainly if _is_plain(fit)), others)
        able = (fit for fit in found if fit.answers and not any(_problems(self.model, fit)))
        host = self.machine.host_bytes
        return next((fit for fit in able if host is None or _on_host(fit) <= room(host)), None)

    def _fits(self, splits: Sequence[Split]) -> Iterator[Fit]:
        return fits(self.model.shape, splits, self.context, self.machine.device_bytes, BUDGETS)

    def does_not_fit(self) -> str:
        """Return the message for the case that no layout fits: the reason, and how many GPUs would do."""
        model, machine, most = self.model, self.machine, 1 if self.shared else max(self.sizes)
        each, size = machine.device_bytes, f"{machine.device_bytes / 1e9:.0f} GB"
        start = f"{model.path} has {model.size} parameters, and its longest prompts with answers have {self.context} "
        start += "tokens: "
        widest = Split(1, max(self.sizes), (1,) if self.shared else self.sizes)
        if not replicas(model.shape, room(each), self.context, widest)[1]:
            vllm = "rollout.name=vllm, whose replicas may have several, " if most == 1 and not self.shared else ""
            return (
                f"{start}{most} × {size}, all that a replica may have, have no room for the weights in bfloat16 and "
                f"one such answer. Give {vllm}GPUs with more memory (--gpu-gb), a smaller model, or a smaller "
                "data.max_response_length"
            )
        start += f"they do not fit on {machine.words}"
        if self.trains is not None:
            start += f", of which {self.trains} train"
        anyhow = replace(self, trains=None)
        enough = next((gpus for gpus in TRIED if gpus > machine.gpus and anyhow.first(gpus) is not None), None)
        way_out = "Give a smaller model, or"
        if enough is not None:
            way_out = f"{enough} GPUs of {size} would do (--gpus {enough}); or give"
        return f"{start}. {way_out} a smaller data.max_response_length"


def _asked(machine: Machine, given: Mapping[str, Any]) -> int | None:
    """Return the number of training GPUs, if the user gave it or the number of generating ones; else None.

    Raises:
        ConfigError: no GPUs are left for the other role.
    """
    for role, others in (("trainer", "rollout"), ("rollout", "trainer")):
        if not any(f"{role}.{key}" in given for key in ("nnodes", "n_gpus_per_node")):
            continue
        nodes = int(given.get(f"{role}.nnodes", 1))
        count = nodes * int(given.get(f"{role}.n_gpus_per_node", PER_MACHINE if nodes > 1 else 1))
        left = machine.gpus - count
        if not 0 < count < machine.gpus or any(n > PER_MACHINE and n % PER_MACHINE for n in (count, left)):
            raise ConfigError(
                f"{role}.nnodes × {role}.n_gpus_per_node is {count} of {machine.gpus} GPUs, which leaves {left} for "
                f"{others}; each needs at least one, and of more than {PER_MACHINE} whole machines of {PER_MACHINE}. "
                "Give --gpus N, the number of all"
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
    """Yield the reasons against this layout."""
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


def _machines(devices: int) -> tuple[int, int]:
    """Return the number of machines, and of devices on each."""
    return (1, devices) if devices <= PER_MACHINE else (devices // PER_MACHINE, PER_MACHINE)


# ------------------------------------------------------------------------------------------ memory of the whole run


CACHE = "rollout.kv_cache_gib"
KEYS_AND_VALUES, GENERATION = "keys and values", "generation"
RECOMPUTE, WHY_RECOMPUTE = (
    "model.enable_gradient_checkpointing",
    "activations do not fit otherwise; a third more compute",
)
TRIES = 3
"""Number of times that the KV cache's limit is computed: a limit allows more slots, whose logits take memory, too."""
LEAST_ANSWERS = 4
"""Minimum number of whole answers that a replica on a CPU has room for."""
IN_PLACE = Choice("rollout.enable_dual_buffer", False, "there is no room for a second copy of the served weights")
SAVERS = (Choice(RECOMPUTE, True, WHY_RECOMPUTE), IN_PLACE)
"""Settings that save memory on CPUs, the cheapest first."""


def config_of(choices: Sequence[Choice]) -> Config:
    """Return the configuration with these choices."""
    return load(None, Layer("by what was chosen", {choice.key: choice.value for choice in choices})).config


def within_memory(choices: Sequence[Choice], model: ModelFacts, machine: Machine) -> list[Choice]:
    """Return the choices; if the run would not fit, with a limit on the KV cache or further memory savers.

    Raises:
        ConfigError: the run takes more memory than there is.
    """
    on_cpu, most, made = machine.on_cpu, room(machine.device_bytes), list(choices)
    config, chosen = config_of(made), {choice.key for choice in made}
    savers = SAVERS if on_cpu else SAVERS[1:] if config.cluster.placement == "split" else ()
    answer = (config.data.max_prompt_length + config.data.max_response_length) * model.shape.cache(
        FLOAT if on_cpu else BF16
    )
    least = answer * (LEAST_ANSWERS if on_cpu else 1)

    def total(found: Sequence[RunProcess]) -> int:
        """Return the bytes of all processes on a CPU, where they share memory; of the largest process on GPUs."""
        return sum(one.count * one.memory.device for one in found) if on_cpu else max(map(_taken, found))

    for further in (None, *(choice for choice in savers if choice.key not in chosen)):
        made = made if further is None else [*made, further]
        limited = made
        for _ in range(TRIES + 1):  # the last limit is checked, too
            found = taken(limited, model, machine)
            if (excess := total(found) - most) <= 0:
                return limited
            held = next((nbytes for one in found if (nbytes := _cache(one)) is not None), 0)
            gib = math.floor((held - excess) / GIB * 100) / 100  # rounded up it would not fit
            if gib * GIB < least or any(choice.key == CACHE and choice.reason == GIVEN for choice in limited):
                break
            limit = Choice(CACHE, gib, "GiB of keys and values: what there is left for them")
            limited = [*(choice for choice in limited if choice.key != CACHE), limit]
    found = taken([*(choice for choice in made if choice.key != CACHE), Choice(CACHE, least / GIB)], model, machine)
    what = "a run on this machine's CPU" if on_cpu else f"a {max(found, key=_taken).name}"
    raise ConfigError(
        f"{model.path} has {model.size} parameters, and with these settings {what} takes {total(found) / 1e9:.1f} GB "
        f"at the least, of which there are {machine.device_bytes / 1e9:.1f}, and a tenth stays free; give more "
        "GPUs (--gpus N), a smaller model, or a smaller data.max_response_length or actor.ppo_max_token_len_per_gpu"
    )


def taken(choices: Sequence[Choice], model: ModelFacts, machine: Machine) -> list[RunProcess]:
    """Return the run's processes with their device memory. vLLM's, which take all free memory, are left out."""
    device_bytes = None if machine.on_cpu else machine.device_bytes
    config = config_of(choices)
    found = processes(config, model.shape, on_cpu=machine.on_cpu, device_bytes=device_bytes)
    left_out = () if config.rollout.name == "native" else (REPLICA, OF_REPLICA)
    return [one for one in found if one.memory.device and one.name not in left_out]


def _taken(process: RunProcess) -> int:
    """Return the bytes that a process takes while it generates; for one that does not, its maximum."""
    memory = process.memory
    if GENERATION not in memory.moments:
        return memory.device
    lines = (*memory.held, *memory.moments[GENERATION])
    return sum(line.nbytes for line in lines if not line.on_host)


def _cache(process: RunProcess) -> int | None:
    lines: tuple[MemoryItem, ...] = process.memory.held + tuple(process.memory.moments.get(GENERATION, ()))
    return next((line.nbytes for line in lines if line.name == KEYS_AND_VALUES), None)
