"""Kinds of devices that workers compute on: the CPU, and accelerators beside it. No other module knows which there are.

    kind_of("cuda:1"), kind_of(tensor.device) ─▶ a `DeviceKind`: what it has, and what is done with one of its devices

All other code asks a kind what it needs to know (whether it pins host memory, whether it has streams), never which one
it is. Another accelerator is a class here, in `ACCELERATORS`, and its name among the values of ``cluster.device``
(docs/architecture.md has the list of what it gives). Torch is imported when a device is used, not with this module.
"""

from __future__ import annotations

import logging
import math
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from headway.errors import ConfigError
from headway.gpu_listing import Gpu, listed_gpus, visible

if TYPE_CHECKING:
    import torch

    Device = torch.device | str
    """A device of some kind, as torch names it: ``cuda:1``, or ``cuda`` for the current one."""

log = logging.getLogger(__name__)

Compute = Callable[[], None]


class GraphRecorder(Protocol):
    """Records functions of fixed memory: they write their result, too, into memory that stays where it is."""

    def record(self, compute: Compute) -> Compute:
        """Run ``compute`` once or more, and return a function that does the same with fewer launches.

        Raises `RuntimeError` where that cannot be done.
        """

    def reset(self) -> None:
        """Drop all recordings."""


class DeviceKind:
    """Operations of a kind of device: here those of a CPU, on which most do nothing.

    kind = kind_of(model.device)
    buffer = host_buffer(nbytes, pinned=kind.pins_host_memory)
    stream = kind.side_stream(model.device)  # None on a CPU
    """

    name: str
    """Name of the kind, as torch and ``cluster.device`` have it: ``cuda``."""
    called: str
    """Word for one such device in messages: ``GPU``."""
    dtype: str
    """Dtype of matrix products where the user leaves it open, as torch names it: ``bfloat16``."""
    collectives: str
    """Backend of torch.distributed whose collectives take this kind's tensors: ``nccl``."""
    ray_resource: str | None = None
    """Name of the devices among Ray's resources: ``GPU``. None for the CPU, of which no whole one is reserved."""
    profiled_as: str | None = None
    """Name under which torch's profiler records the devices beside the CPU (``use_device``)."""
    pins_host_memory: bool = False
    """True where buffers in host memory are page-locked, since copies to the devices are quicker from there."""
    runs_ahead: int = 0
    """Decoding steps that are launched before the tokens of the one before are read; 0 where work is done at once."""
    flex_attention: bool = False
    """True where attention over packed lines is FlexAttention, compiled for the device; without, all of its scores are
    in memory at once, but on CPUs, which have kernels of their own."""
    compiles_kernels: bool = False
    """True where Triton compiles kernels for the devices."""
    varlen_attention: bool = False
    """True where torch may have FlashAttention over sequences of different lengths; the native engine tries it."""

    @property
    def process_groups(self) -> str:
        """Backends of a default process group, which takes tensors in host memory, too: ``cpu:gloo,cuda:nccl``."""
        return "gloo" if self.collectives == "gloo" else f"cpu:gloo,{self.name}:{self.collectives}"

    def is_there(self) -> bool:
        """Tell whether torch sees a device of the kind here."""
        return True

    def count(self) -> int:
        """Return the number of devices that torch sees here."""
        return 1

    def listed(self) -> int | None:
        """Return the number of devices that a process may use, found without loading torch. None where it cannot be.

        Devices that the environment hides (``CUDA_VISIBLE_DEVICES``) do not count.
        """
        return None

    def memory_listed(self) -> int | None:
        """Return the bytes of memory of the smallest device here, found without loading torch. None where it is not
        known.
        """
        return None

    def device_name(self, device: Device) -> str | None:
        """Return the device's model. None for the CPU, whose name the system knows."""
        return None

    def make_current(self, device: Device) -> None:
        """Make ``device`` the one that is meant where this process names none."""

    def synchronize(self, device: Device) -> None:
        """Wait until ``device`` has done all that it was given. Returns at once where nothing is queued."""

    def side_stream(self, device: Device) -> DeviceStream | None:
        """Return a new stream of work on ``device``, beside its default one. None where there are no streams."""
        return None

    def mark(self, device: Device) -> Callable[[], None]:
        """Return a function that waits until ``device`` has done what this thread's stream was given up to now."""
        return _nothing

    def recorder(self, device: Device) -> GraphRecorder | None:
        """Return a recorder of work on ``device``, to be replayed in one launch. None where nothing can be recorded."""
        return None

    def own_group(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any | None:
        """Form a process group over `collectives`, from a store alone and apart from torch's default group.

        None where `collectives` is Gloo, whose group is made with its address, by
        `engines.weights.transports.process_group`.
        """
        return None

    def total_memory(self, device: Device) -> int | None:
        """Return the bytes of memory that ``device`` has. None for the CPU, which shares its memory with everything."""
        return None

    def free_memory(self, device: Device) -> int | None:
        """Return the bytes of ``device`` that neither tensors of this process nor anything else holds; for the CPU
        those of the machine that programs may still take. None where it does not say.
        """
        return None

    def allocated_memory(self, device: Device) -> int | None:
        """Return the bytes that tensors of this process hold on ``device``. None where not counted."""
        return None

    def peak_memory(self, device: Device) -> int | None:
        """Return the most bytes that tensors held on ``device`` since `reset_peak`. None where not counted."""
        return None

    def reset_peak(self, device: Device) -> None:
        """Let `peak_memory` begin anew, at what is held now."""

    def release_cached(self) -> None:
        """Give memory that torch holds for later tensors back to the devices, for other processes."""

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        """Lock the pages of ``memory`` that this process has mapped, and return a function that undoes it.

        Without it, copies are slower, and right.
        """
        return _nothing


class Cpu(DeviceKind):
    """The machine's processors, and its memory."""

    name = "cpu"
    called = "CPU"
    dtype = "float32"
    collectives = "gloo"
    limits = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
    """Files in which a container's limit is, in bytes; without one, a word or a number beyond all memory."""
    memory = Path("/proc/meminfo")

    def listed(self) -> int:
        return 1

    def memory_listed(self) -> int:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return min([physical, *(int(text) for file in self.limits if (text := _text_of(file)).isdigit())])

    def free_memory(self, device: Device) -> int | None:
        found = re.search(r"MemAvailable:\s+(\d+)", _text_of(self.memory))
        return None if found is None else int(min([1024 * int(found[1]), *map(_left_below, self.limits)]))


def _left_below(limit: Path) -> float:
    """Return the bytes below a container's limit that programs may still take, cached files among them."""
    used = _text_of(limit.with_name("memory.current" if limit.name == "memory.max" else "memory.usage_in_bytes"))
    if not (_text_of(limit).isdigit() and used.isdigit()):
        return math.inf
    # Cached files count as used, and are given up first: without them a machine that has read a model looks full.
    cached = re.search(r"^inactive_file (\d+)", _text_of(limit.with_name("memory.stat")), re.MULTILINE)
    return int(_text_of(limit)) - int(used) + (0 if cached is None else int(cached[1]))


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _nothing() -> None:
    pass


class Accelerator(DeviceKind):
    """Kind of device with a torch module `name`, used through the functions that such modules share."""

    runs_ahead = 1

    @property
    def _torch(self) -> Any:
        import torch

        return torch.get_device_module(self.name)

    def is_there(self) -> bool:
        return bool(self._torch.is_available())

    def count(self) -> int:
        return int(self._torch.device_count())

    def device_name(self, device: Device) -> str | None:
        return str(self._torch.get_device_name(device))

    def make_current(self, device: Device) -> None:
        self._torch.set_device(device)

    def synchronize(self, device: Device) -> None:
        self._torch.synchronize(device)

    def side_stream(self, device: Device) -> DeviceStream | None:
        return DeviceStream(self._torch, device)

    def mark(self, device: Device) -> Callable[[], None]:
        event = self._torch.Event()
        event.record(self._torch.current_stream(device))
        wait: Callable[[], None] = event.synchronize
        return wait

    def total_memory(self, device: Device) -> int | None:
        return int(self._torch.get_device_properties(device).total_memory)

    def free_memory(self, device: Device) -> int | None:
        free, _ = self._torch.mem_get_info(device)
        return int(free + self._torch.memory_reserved(device) - self._torch.memory_allocated(device))

    def allocated_memory(self, device: Device) -> int | None:
        return int(self._torch.memory_allocated(device))

    def peak_memory(self, device: Device) -> int | None:
        return int(self._torch.max_memory_allocated(device))

    def reset_peak(self, device: Device) -> None:
        self._torch.reset_peak_memory_stats(device)

    def release_cached(self) -> None:
        self._torch.empty_cache()


OWN_NCCL_ERRORS = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",  # `wait` returns when the collective has ended, or raises after its time-out
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # by default NCCL's watchdog ends the process when another member died
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # ends the process when the watchdog hangs in a call to a dead member
}
"""Variables that a group of NCCL reads when it is made, so that a failure ends its collectives and nothing else."""
_making_group = threading.Lock()


class Cuda(Accelerator):
    """GPUs of NVIDIA, and those of AMD, which torch gives the same name."""

    name = "cuda"
    called = "GPU"
    dtype = "bfloat16"
    collectives = "nccl"
    ray_resource = "GPU"
    profiled_as = "cuda"
    pins_host_memory = True
    flex_attention = True
    compiles_kernels = varlen_attention = True

    amd = Path("/dev/kfd")
    nvidia = (Path("/proc/driver/nvidia"), Path("/dev/nvidiactl"), Path("/dev/dxg"))
    """What a machine with a driver of NVIDIA's may have: a container lacks the first, WSL has the last alone."""

    def is_there(self) -> bool:
        # By the driver's library of management: torch's own check starts CUDA, and a process that is forked afterwards,
        # as vLLM forks its workers, cannot use a GPU any more. With the variable torch asks that library, too, but not
        # for parts of a GPU (MIG).
        import torch

        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        if torch.version.cuda is not None and (listed := self.listed()) is not None:
            return listed > 0
        return super().is_there()

    def listed(self) -> int | None:
        gpus = self._gpus()
        return None if gpus is None else len(gpus)

    def memory_listed(self) -> int | None:
        sizes = [nbytes for _, nbytes in self._gpus() or ()]
        return None if None in sizes else min((nbytes for nbytes in sizes if nbytes is not None), default=None)

    def _gpus(self) -> list[Gpu] | None:
        """Return the GPUs that a process may use. None where they cannot be listed."""
        if self.amd.exists():
            return None
        if (found := listed_gpus()) is None:
            return None if any(path.exists() for path in self.nvidia) else []
        return visible(found, os.environ.get("CUDA_VISIBLE_DEVICES"))

    def recorder(self, device: Device) -> GraphRecorder | None:
        return CudaRecorder(device)

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        import torch

        runtime = self._torch.cudart()
        # Registered where it is: `Tensor.pin_memory` makes a copy, which other processes do not write into.
        if int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) != 0:
            log.warning("the copy of the weights could not be page-locked: loading them takes longer")
            # CUDA keeps the error for this thread's next launch, and torch has no function that drops it.
            with suppress(RuntimeError):
                torch.ones(1, device=self.name)
            return _nothing

        def unpin() -> None:
            runtime.cudaHostUnregister(memory.data_ptr())

        return unpin

    def own_group(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any | None:
        # Imported late: a CPU build of torch has no NCCL.
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        with _making_group:
            before = {name: os.environ[name] for name in OWN_NCCL_ERRORS if name in os.environ}
            os.environ.update(OWN_NCCL_ERRORS)
            try:
                return ProcessGroupNCCL(store, rank, size, options)
            finally:  # torch's other groups keep what was set for them
                for name in OWN_NCCL_ERRORS:
                    del os.environ[name]
                os.environ.update(before)


class DeviceStream:
    """A stream of work on an accelerator, for a thread beside the one that computes on the default stream.

        default stream    decode ▷ decode ▷ decode ▷ decode ▷ load ▷ decode
        side stream          └▷ receive ▷ copy ▷ receive ▷ copy │ host waits, then reports the version as received

    Work of one stream runs in order: buckets on the default stream would queue behind decoding steps, and steps behind
    buckets.
    """

    def __init__(self, module: Any, device: Device) -> None:
        """Make the stream. ``module``: torch's for this kind of device."""
        self._module, self._device = module, device
        self._stream = module.Stream(device)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Run this thread's work on the stream. When the block ends, the device has done the work.

        The work begins after what the default stream was given so far, which may still read the tensors that are
        written here. Other streams need no event: the host waits before it tells them of the tensors. For the same
        reason no tensor needs `record_stream`: memory that is taken in the block goes back to this stream, and memory
        of another stream cannot be freed and taken again while work here still writes to it.
        """
        self._stream.wait_stream(self._module.default_stream(self._device))
        try:
            with self._module.stream(self._stream):
                yield
        except BaseException:
            with suppress(RuntimeError):  # what went wrong first is the reason
                self._stream.synchronize()
            raise
        self._stream.synchronize()

    def bring(self, buffer: torch.Tensor) -> torch.Tensor:
        """Copy ``buffer``, page-locked, to the device while that computes. Work that is queued later waits for it."""
        import torch

        current = self._module.current_stream(self._device)
        with self._module.stream(self._stream):
            # Taken here: memory that the computing stream gave back may still be used by what is queued there.
            there = torch.empty_like(buffer, device=self._device)
            there.copy_(buffer, non_blocking=True)
        current.wait_stream(self._stream)
        # Dropped by the host, the memory would else be written again before the computing stream has read it.
        there.record_stream(current)
        return there


class CudaRecorder:
    """Records CUDA graphs, of which one is replayed at a time: what they compute on the way shares a pool of memory."""

    _one_at_a_time = threading.Lock()
    """The lock of all recorders of a process: CUDA lets one thread record."""

    def __init__(self, device: Device) -> None:
        import torch

        self._cuda = torch.cuda
        self._device = device
        self._stream = self._cuda.Stream(device)
        self.reset()

    def record(self, compute: Compute) -> Compute:
        with self._one_at_a_time, self._cuda.device(self._device):
            current = self._cuda.current_stream()
            self._stream.wait_stream(current)
            with self._cuda.stream(self._stream):
                compute()  # libraries take their workspaces now, and compile what they have to
            current.wait_stream(self._stream)  # before the recording: the warm-up writes the same memory
            graph = self._cuda.CUDAGraph()
            # Other threads may copy weights to this device meanwhile: only this thread's calls are held to the rules.
            with self._cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                compute()
        return graph.replay

    def reset(self) -> None:
        self._pool = self._cuda.graph_pool_handle()  # of the old one memory may be left in graphs that still live


CPU = Cpu()
ACCELERATORS: tuple[DeviceKind, ...] = (Cuda(),)
"""Kinds beside the CPU. ``cluster.device=auto`` is the first that is there."""
KINDS = {kind.name: kind for kind in (CPU, *ACCELERATORS)}


def kind_of(device: Device) -> DeviceKind:
    """Return the kind of ``device``. Raises `ConfigError` for one that Headway does not compute on."""
    name = device.partition(":")[0] if isinstance(device, str) else device.type
    if name not in KINDS:
        raise ConfigError(f"Headway computes on {' and '.join(KINDS)}, and not on a device of the kind {name!r}")
    return KINDS[name]


def kind_here() -> DeviceKind:
    """Return the first accelerator that torch sees here, or else the CPU."""
    return next((kind for kind in ACCELERATORS if kind.is_there()), CPU)


def listed_here() -> int | None:
    """Return the number of all accelerators here, as `DeviceKind.listed` counts them; None where it is not known."""
    known = [count for kind in ACCELERATORS if (count := kind.listed()) is not None]
    return sum(known) if len(known) == len(ACCELERATORS) else None


def memory_listed_here(*, on_cpu: bool) -> int | None:
    """Return the bytes of memory of this machine, or of the smallest accelerator here, without loading torch.

    None where they are not known.
    """
    known = [nbytes for kind in ((CPU,) if on_cpu else ACCELERATORS) if (nbytes := kind.memory_listed()) is not None]
    return min(known, default=None)


def chosen(
    asked: str,
    sees: Callable[[DeviceKind], bool] = lambda kind: kind.is_there(),
    lacking: str = "torch sees no {} here",
) -> str:
    """Return the name of the kind for ``cluster.device=asked``; ``auto``: the first accelerator there, or else the CPU.

    ``sees`` tells whether a kind is there. Raises `ConfigError` for one that is not: ``lacking`` says who sees none.
    """
    if asked == "auto":
        return next((kind for kind in ACCELERATORS if sees(kind)), CPU).name
    if not sees(kind := kind_of(asked)):
        raise ConfigError(f"cluster.device={asked}, but {lacking.format(kind.called)}; set cluster.device=cpu")
    return asked
