"""Available devices: of this machine, or the GPUs that the user names."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from headway.cluster.hardware import available_cores
from headway.config.sizing.memory_fitting import PER_MACHINE
from headway.devices import listed_here, memory_listed_here
from headway.errors import ConfigError

USUAL_GPU = 80_000_000_000
"""Bytes of a GPU that nobody has told of."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Devices of a run."""

    gpus: int
    """0 for a run on CPUs."""
    device_bytes: int
    """Memory of a GPU, or of the machine."""
    cores: int
    vllm: bool = False
    """True where vLLM is installed."""
    host_bytes: int | None = None
    """Memory of the machine that GPUs are in; None where it is not known."""
    here: bool = True
    """False where the GPUs are not those of this machine."""

    @property
    def on_cpu(self) -> bool:
        return self.gpus == 0

    @property
    def nodes(self) -> int:
        return -(-self.gpus // PER_MACHINE)

    @property
    def words(self) -> str:
        if self.on_cpu:
            return f"{self.cores} {'core' if self.cores == 1 else 'cores'}, no GPU"
        size = f"{self.gpus} {'GPU' if self.gpus == 1 else 'GPUs'} of {self.device_bytes / 1e9:.0f} GB"
        return size if self.here else f"{size}, not those of this machine"


def look_here(gpus: int | None, gpu_gb: float | None) -> Machine:
    """Return what there is here, or what the user tells of: so many GPUs, of so many GB each.

    Raises:
        ConfigError: more than a machine's GPUs that are no whole machines; or nobody tells how many there are.
    """
    known_here = listed_here()
    if gpus is None and known_here is None:
        raise ConfigError("how many GPUs this machine has is not known; give --gpus N (0: CPUs)")
    there = known_here or 0
    wanted = there if gpus is None else gpus
    if wanted > PER_MACHINE and wanted % PER_MACHINE:
        raise ConfigError(
            f"--gpus {wanted}: above {PER_MACHINE} they are counted in machines of {PER_MACHINE}; give a multiple of "
            f"{PER_MACHINE}, such as {wanted // PER_MACHINE * PER_MACHINE}"
        )
    known, host = memory_listed_here(on_cpu=wanted == 0), memory_listed_here(on_cpu=True)
    given = None if gpu_gb is None or wanted == 0 else int(gpu_gb * 1e9)
    return Machine(
        gpus=wanted,
        device_bytes=given or known or USUAL_GPU,
        cores=available_cores(),
        vllm=importlib.util.find_spec("vllm") is not None,
        host_bytes=host if wanted <= there else None,
        here=wanted <= there,
    )
