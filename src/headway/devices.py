"""Kinds of devices that workers compute on: the CPU and accelerators. No other module knows the list of kinds.

    kind_of("cuda:1"), kind_of(tensor.device) ─▶ a `DeviceKind`: its features, and the operations on its devices

All other code asks a kind for its features (does it pin host memory? does it have streams?), never for its name. To add
an accelerator, add a class to `ACCELERATORS`, and its name to the values of ``cluster.device``; docs/architecture.md
lists what the class has to define. Torch is imported when a device is used, not with this module.
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
    """Records functions whose inputs and results stay at fixed addresses in memory."""

    def record(self, compute: Compute) -> Compute:
        """Run ``compute`` at least once, and return a function that does the same with fewer launches.

        Raises `RuntimeError` if ``compute`` cannot be recorded.
        """

    def reset(self) -> None:
        """Drop all recordings."""


class DeviceKind:
    """Operations of a kind of device. These defaults are for the CPU, where most do nothing.

    kind = kind_of(model.device)
    buffer = host_buffer(nbytes, pinned=kind.pins_host_memory)
    stream = kind.side_stream(model.device)  # None on a CPU
    """

    name: str
    """Name of the kind in torch and in ``cluster.device``: ``cuda``."""
    called: str
    """Word for one such device in messages: ``GPU``."""
    dtype: str
    """Default dtype of matrix products, as torch names it: ``bfloat16``."""
    collectives: str
    """Backend of torch.distributed for this kind's tensors: ``nccl``."""
    ray_resource: str | None = None
    """Name of the devices among Ray's resources: ``GPU``. None for the CPU, which is not reserved as a whole."""
    profiled_as: str | None = None
    """Name of the devices in torch's profiler (``use_device``); None for the CPU, which it always records."""
    pins_host_memory: bool = False
    """True if buffers in host memory are page-locked, because copies from them to the devices are faster."""
    runs_ahead: int = 0
    """Number of decoding steps launched before the tokens of the step before are read; 0 if work is not queued."""
    flex_attention: bool = False
    """True if attention over packed lines is FlexAttention, compiled for the device. Otherwise it holds all scores in
    memory at once, except on CPUs, which have kernels of their own."""
    compiles_kernels: bool = False
    """True if Triton compiles kernels for the devices."""
    varlen_attention: bool = False
    """True if torch may have FlashAttention over sequences of different lengths; the native engine tries it."""

    @property
    def process_groups(self) -> str:
        """Backends of a default process group, which also takes tensors in host memory: ``cpu:gloo,cuda:nccl``."""
        return "gloo" if self.collectives == "gloo" else f"cpu:gloo,{self.name}:{self.collectives}"

    def is_there(self) -> bool:
        """Tell whether torch sees a device of the kind here."""
        return True

    def count(self) -> int:
        """Return the number of devices that torch sees here."""
        return 1

    def listed(self) -> int | None:
        """Return the number of devices that a process may use, without loading torch. None if it is not known.

        Devices that the environment hides (``CUDA_VISIBLE_DEVICES``) do not count.
        """
        return None

    def memory_listed(self) -> int | None:
        """Return the bytes of memory of the smallest device here, without loading torch. None if not known."""
        return None

    def device_name(self, device: Device) -> str | None:
        """Return the name of the device's model. None for the CPU, whose name comes from the operating system."""
        return None

    def make_current(self, device: Device) -> None:
        """Make ``device`` the default of this thread for its kind."""

    def synchronize(self, device: Device) -> None:
        """Wait until ``device`` has done all of its queued work. Returns at once if nothing is queued."""

    def side_stream(self, device: Device) -> DeviceStream | None:
        """Return a new stream on ``device``, next to its default stream. None if the kind has no streams."""
        return None

    def mark(self, device: Device) -> Callable[[], None]:
        """Return a function that waits until ``device`` has done the work queued so far on this thread's stream."""
        return _nothing

    def recorder(self, device: Device) -> GraphRecorder | None:
        """Return a recorder of work on ``device``, for replay in one launch. None if the kind cannot record."""
        return None

    def own_group(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any | None:
        """Make a process group over `collectives` from a store, independent of torch's default group.

        None if `collectives` is Gloo: `engines.weights.transports.process_group` makes that group, with its address.
        """
        return None

    def total_memory(self, device: Device) -> int | None:
        """Return the bytes of memory of ``device``. None for the CPU, which has no memory of its own."""
        return None

    def free_memory(self, device: Device) -> int | None:
        """Return the bytes of ``device`` that are in use by nobody; torch's unused cache here counts as free.

        For the CPU: the bytes of host memory that programs may still take. None if not known.
        """
        return None

    def allocated_memory(self, device: Device) -> int | None:
        """Return the bytes that tensors of this process hold on ``device``. None if not counted."""
        return None

    def peak_memory(self, device: Device) -> int | None:
        """Return the most bytes that tensors held on ``device`` since `reset_peak`. None if not counted."""
        return None

    def reset_peak(self, device: Device) -> None:
        """Restart `peak_memory` from the bytes that are held now."""

    def release_cached(self) -> None:
        """Release torch's cached device memory, so that other processes can use it."""

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        """Lock the mapped pages of ``memory``, and return a function that unlocks them.

        Copies from unlocked pages are slower but correct.
        """
        return _nothing


class Cpu(DeviceKind):
    """The machine's processors and their memory."""

    name = "cpu"
    called = "CPU"
    dtype = "float32"
    collectives = "gloo"
    limits = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
    """Files with a container's memory limit in bytes. Without a limit: a word, or a number beyond all memory."""
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
    """Return the bytes that programs may still take below a container's limit; cached files count as free."""
    used = _text_of(limit.with_name("memory.current" if limit.name == "memory.max" else "memory.usage_in_bytes"))
    if not (_text_of(limit).isdigit() and used.isdigit()):
        return math.inf
    # The kernel counts cached files as used, and drops them first: a machine that has read a model would look full.
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
    """Kind of device with a torch module called `name`, used through the functions that such modules share."""

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
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # by default NCCL's watchdog kills the process when another member died
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # by default it kills the process when the watchdog hangs on a dead member
}
"""Variables that an NCCL group reads when it is made: with these, a failure ends its collectives and nothing else."""
_making_group = threading.Lock()


class Cuda(Accelerator):
    """GPUs of NVIDIA and AMD; torch calls both ``cuda``."""

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
    """Paths that show NVIDIA's driver. A container lacks the first; WSL has only the last."""

    def is_there(self) -> bool:
        # Ask NVML, the driver's management library: torch's own check starts CUDA, and a process that is forked
        # afterwards, as vLLM's workers are, cannot use a GPU any more. With the variable torch asks NVML, too, but not
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
        """Return the GPUs that a process may use. None if they cannot be listed."""
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
        # Registered in place: `Tensor.pin_memory` makes a copy, which other processes would not write into.
        if int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) != 0:
            log.warning("the copy of the weights could not be page-locked: loading them takes longer")
            # CUDA reports the error again at this thread's next launch, and torch has no function that clears it.
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
            finally:  # torch's other groups keep the settings of the user
                for name in OWN_NCCL_ERRORS:
                    del os.environ[name]
                os.environ.update(before)


class DeviceStream:
    """A stream on an accelerator, for another thread than the one that computes on the default stream.

        default stream    decode ▷ decode ▷ decode ▷ decode ▷ load ▷ decode
        side stream          └▷ receive ▷ copy ▷ receive ▷ copy │ host waits, then reports the version as received

    Work of one stream runs in order: buckets on the default stream would queue behind decoding steps, and steps behind
    buckets.
    """

    def __init__(self, module: Any, device: Device) -> None:
        """Make the stream. ``module``: torch's module for this kind of device, such as `torch.cuda`."""
        self._module, self._device = module, device
        self._stream = module.Stream(device)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Run this thread's work on the stream. When the block ends, the device has done the work.

        The work begins after all work queued so far on the default stream, which may still read the tensors that the
        block writes. Other streams need no event: the host waits for the block before it passes the tensors on. So no
        tensor needs `record_stream` either: memory allocated in the block goes back to this stream, and memory of
        another stream cannot be freed and reused while the block still writes to it.
        """
        self._stream.wait_stream(self._module.default_stream(self._device))
        try:
            with self._module.stream(self._stream):
                yield
        except BaseException:
            with suppress(RuntimeError):  # the first error is the one to report
                self._stream.synchronize()
            raise
        self._stream.synchronize()

    def bring(self, buffer: torch.Tensor) -> torch.Tensor:
        """Copy the page-locked ``buffer`` to the device while it computes. Work queued later waits for the copy."""
        import torch

        current = self._module.current_stream(self._device)
        with self._module.stream(self._stream):
            # Allocated on this stream: memory freed by the computing stream may still be in use by its queued work.
            there = torch.empty_like(buffer, device=self._device)
            there.copy_(buffer, non_blocking=True)
        current.wait_stream(self._stream)
        # Without this, memory that the host frees would be reused before the computing stream has read it.
        there.record_stream(current)
        return there


class CudaRecorder:
    """Records CUDA graphs. Only one may be replayed at a time: their intermediate results share a memory pool."""

    _one_at_a_time = threading.Lock()
    """Lock of all recorders of a process: CUDA lets one thread record at a time."""

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
                compute()  # warm-up: libraries allocate their workspaces and compile kernels now
            current.wait_stream(self._stream)  # before the recording: the warm-up writes the same memory
            graph = self._cuda.CUDAGraph()
            # "thread_local" restricts only this thread's calls: others may copy weights to the device meanwhile.
            with self._cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                compute()
        return graph.replay

    def reset(self) -> None:
        self._pool = self._cuda.graph_pool_handle()  # graphs that still live may hold memory of the old pool


CPU = Cpu()
ACCELERATORS: tuple[DeviceKind, ...] = (Cuda(),)
"""Kinds other than the CPU. ``cluster.device=auto`` is the first one that is available."""
KINDS = {kind.name: kind for kind in (CPU, *ACCELERATORS)}


def kind_of(device: Device) -> DeviceKind:
    """Return the kind of ``device``. Raises `ConfigError` for a kind that Headway does not support."""
    name = device.partition(":")[0] if isinstance(device, str) else device.type
    if name not in KINDS:
        raise ConfigError(f"Headway computes on {' and '.join(KINDS)}, and not on a device of the kind {name!r}")
    return KINDS[name]


def kind_here() -> DeviceKind:
    """Return the first kind of accelerator that torch sees here, or else the CPU."""
    return next((kind for kind in ACCELERATORS if kind.is_there()), CPU)


def listed_here() -> int | None:
    """Return the number of all accelerators here, as `DeviceKind.listed` counts them; None if it is not known."""
    known = [count for kind in ACCELERATORS if (count := kind.listed()) is not None]
    return sum(known) if len(known) == len(ACCELERATORS) else None


def memory_listed_here(*, on_cpu: bool) -> int | None:
    """Return the bytes of memory of this machine, or of the smallest accelerator here, without loading torch.

    None if not known.
    """
    known = [nbytes for kind in ((CPU,) if on_cpu else ACCELERATORS) if (nbytes := kind.memory_listed()) is not None]
    return min(known, default=None)


def chosen(
    asked: str,
    sees: Callable[[DeviceKind], bool] = lambda kind: kind.is_there(),
    lacking: str = "torch sees no {} here",
) -> str:
    """Return the name of the kind for ``cluster.device=asked``; ``auto``: the first available accelerator, or the CPU.

    ``sees`` tells whether a kind is available. Raises `ConfigError`, with ``lacking`` in its message, if it is not.
    """
    if asked == "auto":
        return next((kind for kind in ACCELERATORS if sees(kind)), CPU).name
    if not sees(kind := kind_of(asked)):
        raise ConfigError(f"cluster.device={asked}, but {lacking.format(kind.called)}; set cluster.device=cpu")
    return asked
