"""Advice on whether this machine suits the run: given before workers start, as none of it is an error."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from headway.config.schema import Config
from headway.config.sizing.placement import resolve_placement, several_nodes
from headway.errors import ConfigError


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
            "rollout.name=vllm, but vLLM is not installed here; install it (for a CPU: the packages of "
            "constraints-vllm.txt), or set rollout.name=native"
        )
