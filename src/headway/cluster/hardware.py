"""What a worker computes on, for the record."""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import dataclass
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Hardware:
    host: str
    cpu: str
    """Its model, as it calls itself."""
    cores: int
    """That the process may use, logical ones."""
    gpu: str | None
    """The model of the one that the worker has."""
    threads: int
    """Of torch."""
    pid: int
    """Of its process, on ``host``."""


def hardware_here(device: str) -> Hardware:
    """Of the calling process, whose worker has ``device`` (as torch names it). Call it after threads were set."""
    import torch

    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else None
    return Hardware(socket.gethostname(), cpu_model(), available_cores(), gpu, torch.get_num_threads(), os.getpid())


def available_cores() -> int:
    """Logical cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model(info: Path = CPU_INFO) -> str:
    """``info`` is Linux's; elsewhere, and where it has no model, the platform's own word for the processor."""
    try:
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = (value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == "model name")
    return next(models, "") or platform.processor() or platform.machine()
