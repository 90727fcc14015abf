"""The choices against the memory of whole processes: what is left for keys and values, and what is too much.

The layout was chosen for training; here the run as it is configured is added up, with its slots and buffers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.api.init.model_summary import Machine, ModelFacts
from headway.config.layers import Layer
from headway.config.loading import load
from headway.config.schema import Config
from headway.config.sizing.model_shape import FLOAT
from headway.config.sizing.process_memory import BF16, MemoryItem, room
from headway.config.sizing.run_memory import GIB, OF_REPLICA, REPLICA, RunProcess, processes
from headway.errors import ConfigError

GIVEN = "as given"


@dataclass(frozen=True, slots=True)
class Choice:
    """A setting, and why it has its value."""

    key: str
    value: Any
    reason: str = ""
    main: bool = False
    """True where people who have not read the file should see it, too."""


class Choices:
    """Choices in the making: those that the user has made stand."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given
        self._made: dict[str, Choice] = {}

    def add(self, key: str, value: Any, reason: str = "", *, main: bool = False) -> Any:
        """Choose ``value``, unless ``key`` is given; returns what counts."""
        if key in self._given:
            value, reason = self._given[key], GIVEN
        self._made[key] = Choice(key, value, reason, main)
        return value

    def finished(self) -> list[Choice]:
        """Return all choices, with what was given and not asked for."""
        others = [Choice(key, value, GIVEN) for key, value in self._given.items() if key not in self._made]
        return [*self._made.values(), *others]


CACHE = "rollout.kv_cache_gib"
KEYS_AND_VALUES, GENERATION = "keys and values", "generation"
RECOMPUTE, WHY_RECOMPUTE = (
    "model.enable_gradient_checkpointing",
    "activations do not fit otherwise; a third more compute",
)
TRIES = 3
"""Times that the cache is measured: with a limit there are more slots, whose logits take room in turn."""
LEAST_ANSWERS = 4
"""Whole answers that a replica on a CPU has room for at the least."""
IN_PLACE = Choice("rollout.enable_dual_buffer", False, "there is no room for a second copy of the served weights")
SAVERS = (Choice(RECOMPUTE, True, WHY_RECOMPUTE, main=True), IN_PLACE)
"""What saves memory on CPUs, in the order of what it costs."""


def config_of(choices: Sequence[Choice]) -> Config:
    """Return the configuration that the choices are."""
    return load(None, Layer("by what was chosen", {choice.key: choice.value for choice in choices})).config


def within_memory(choices: Sequence[Choice], model: ModelFacts, machine: Machine) -> list[Choice]:
    """Return the choices, with a limit on keys and values where they would not fit otherwise, or with what saves more.

    Raises:
        ConfigError: the run takes more than there is.
    """
    on_cpu, most, made = machine.on_cpu, room(machine.device_bytes), list(choices)
    config, chosen = config_of(made), {choice.key for choice in made}
    savers = SAVERS if on_cpu else SAVERS[1:] if config.cluster.placement == "split" else ()
    answer = (config.data.max_prompt_length + config.data.max_response_length) * model.shape.cache(
        FLOAT if on_cpu else BF16
    )
    least = answer * (LEAST_ANSWERS if on_cpu else 1)

    def total(found: Sequence[RunProcess]) -> int:
        """Bytes of all processes, which share a CPU's machine, or of the largest one."""
        return sum(one.count * one.memory.device for one in found) if on_cpu else max(map(_taken, found))

    for further in (None, *(choice for choice in savers if choice.key not in chosen)):
        made = made if further is None else [*made, further]
        limited = made
        for _ in range(TRIES + 1):  # the last limit is looked at, too
            found = taken(limited, model, machine)
            if (excess := total(found) - most) <= 0:
                return limited
            held = next((nbytes for one in found if (nbytes := _cache(one)) is not None), 0)
            gib = math.floor((held - excess) / GIB * 100) / 100
            if gib * GIB < least or any(choice.key == CACHE and choice.reason == GIVEN for choice in limited):
                break
            limit = Choice(CACHE, gib, "GiB of keys and values: what there is left for them")
            limited = [*(choice for choice in limited if choice.key != CACHE), limit]
    fewest = [choice for choice in made if choice.key != CACHE] + [Choice(CACHE, least / GIB)]
    what = "a run on this machine's CPU" if on_cpu else "the largest process of the run"
    raise ConfigError(
        f"{model.path} has {model.size} parameters, and with these settings {what} takes "
        f"{total(taken(fewest, model, machine)) / 1e9:.1f} GB at the least, of which there are "
        f"{machine.device_bytes / 1e9:.1f}, and a tenth stays free; give more GPUs (--gpus N), a smaller model, or a "
        "smaller data.max_response_length or actor.ppo_max_token_len_per_gpu"
    )


def taken(choices: Sequence[Choice], model: ModelFacts, machine: Machine) -> list[RunProcess]:
    """Return the processes of the run with their memory on devices, but those that take what they find: vLLM's."""
    device_bytes = None if machine.on_cpu else machine.device_bytes
    config = config_of(choices)
    found = processes(config, model.shape, on_cpu=machine.on_cpu, device_bytes=device_bytes)
    left_out = () if config.rollout.name == "native" else (REPLICA, OF_REPLICA)
    return [one for one in found if one.memory.device and one.name not in left_out]


def _taken(process: RunProcess) -> int:
    """Return the bytes that a process takes when it generates, or, where it does not, at any moment."""
    memory = process.memory
    if GENERATION not in memory.moments:
        return memory.device
    lines = (*memory.held, *memory.moments[GENERATION])
    return sum(line.nbytes for line in lines if not line.on_host)


def _cache(process: RunProcess) -> int | None:
    lines: tuple[MemoryItem, ...] = process.memory.held + tuple(process.memory.moments.get(GENERATION, ()))
    return next((line.nbytes for line in lines if line.name == KEYS_AND_VALUES), None)
