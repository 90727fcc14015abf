"""Set-up of a worker process before heavy imports, and a description of its hardware."""

from __future__ import annotations

import gc
import logging
import os
import platform
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headway.devices import kind_of
from headway.runtime.logs import log_to

CPU_INFO = Path("/proc/cpuinfo")
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables with the settings of torch's allocator for accelerators: the current name and older ones."""


@dataclass(frozen=True, slots=True)
class Hardware:
    host: str
    cpu: str
    """Model name of the CPU."""
    cores: int
    """Number of logical cores that the process may use."""
    gpu: str | None
    """Model of the worker's GPU; None where it has none."""
    threads: int
    """Number of threads that torch uses."""
    pid: int
    """Id of the worker's process on ``host``."""


def hardware_here(device: str) -> Hardware:
    """Describe this process's hardware. Call it once threads are set. ``device``: the worker's device, as torch names
    it.
    """
    import torch

    gpu = kind_of(device).device_name(device)
    return Hardware(socket.gethostname(), cpu_model(), available_cores(), gpu, torch.get_num_threads(), os.getpid())


def available_cores() -> int:
    """Return the number of logical cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model(info: Path = CPU_INFO) -> str:
    """Return the CPU's model from Linux's ``info``, or the platform's name for the processor on other systems."""
    text = info.read_text(encoding="utf-8", errors="replace") if info.exists() else ""
    found = re.search(r"^model name\s*:[ \t]*(\S.*)", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def threads_of(threads: int, sharing: int) -> int:
    """Return ``threads`` or, if that is 0, this machine's cores divided by ``sharing`` processes; at least 1."""
    return threads or max(1, available_cores() // sharing)


def math_environment(threads: int) -> dict[str, str]:
    """Return variables for math libraries. ``MKL_CBWR``: a row of a matrix product does not depend on those beside it.

    ``TORCH_CUDNN_SDPA_DEPRIORITIZED``: torch's attention on GPUs takes cuDNN's kernels last. These are compiled for
    each new length, in 60 ms each on an H200, and lengths hardly ever come twice.

    ``OMP_WAIT_POLICY``: threads that wait sleep instead of spinning. Spinning takes cores from other processes, this
    run's included: on two busy cores it made a step of two threads 2.6 times slower.
    """
    return {
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "MKL_CBWR": "AUTO,STRICT",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
    }


def training_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return variables for a process that only trains; none if ``given``, the user's environment, has one of
    `ALLOCATOR`.

    ``expandable_segments``: micro-batches of varying sizes leave gaps between segments of fixed size, which cannot be
    joined; growing segments avoid them. Replicas do not use it: vLLM's sleep mode and memory shared by CUDA IPC handles
    do not support it everywhere. No weight transport uses such handles.
    """
    return {} if any(name in given for name in ALLOCATOR) else {ALLOCATOR[0]: "expandable_segments:True"}


def set_up_process(name: str, threads: int, log_file: Path, *, only_trains: bool = False) -> None:
    """Set up environment, log file and signals of the process of worker ``name``. Runs before torch is imported.

    ``threads``: number of threads for torch, OpenMP and MKL each. ``only_trains``: it gets `training_environment`.
    """
    os.environ.update(math_environment(threads))
    if only_trains:
        os.environ.update(training_environment(os.environ))
    redirect_output(log_file)
    log_to(logging.StreamHandler(sys.stderr), log_file.parent.parent.name, name)
    # Ctrl-C reaches every process of the terminal: only the driver decides what it means.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    else:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # `signal.signal` raises outside the main thread


@contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection while modules are imported: for torch and transformers it takes a sixth of the
    time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Exclude existing objects from garbage collection, and collect the rest seldom.

    For a process with many small objects and few cycles: with Python's thresholds an episode worker spent a tenth of
    its time on collection, and each full collection reads tens of megabytes of modules through shared caches.
    """
    usual = gc.get_threshold()
    gc.collect()  # before freezing: frozen garbage is never freed
    gc.freeze()
    gc.set_threshold(20_000, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


def redirect_output(log_file: Path) -> None:
    """Send everything that this process writes, native libraries included, to ``log_file`` from now on."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    # Before the descriptors change: buffered text belongs to the output so far.
    sys.stdout.flush()
    sys.stderr.flush()
    target = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    # The descriptors, and not `sys.stdout`: native libraries write to these.
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)  # a killed process would lose its buffer
