"""Hardware that a worker computes on, for the record."""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import dataclass
from pathlib import Path

from headway.devices import kind_of

CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Hardware:
    host: str
    cpu: str
    """Model of the CPU, as it calls itself."""
    cores: int
    """Number of logical cores that the process may use."""
    gpu: str | None
    """Model of the worker's GPU; None where it has none."""
    threads: int
    """Number of threads that torch uses."""
    pid: int
    """Id of the worker's process on ``host``."""


def hardware_here(device: str) -> Hardware:
    """Describe this process's hardware, once threads are set. ``device``: its worker's, as torch names it."""
    import torch

    gpu = kind_of(device).device_name(device)
    return Hardware(socket.gethostname(), cpu_model(), available_cores(), gpu, torch.get_num_threads(), os.getpid())


def available_cores() -> int:
    """Return the number of logical cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model(info: Path = CPU_INFO) -> str:
    """Return the CPU's model from Linux's ``info``; elsewhere the platform's own word for the processor."""
    try:
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = (value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == "model name")
    return next(models, "") or platform.processor() or platform.machine()
