"""Counting of what a GPU would be asked to do, on a machine without one.

    with on_fake_cuda() as counts:       tensors are fake: they have a shape, a dtype and the device "cuda", and no data
        run the engine, or the trainer
    counts.operations, counts.attention, counts.uploads, …

Operations are counted, as torch's dispatcher sees them, and not kernels: an operation is one kernel or several, which
only a GPU tells. Views and memory that is only taken do not count. What the host reads is 0.0, False or 1.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headway import devices
from headway.devices import Compute, Cuda, GraphRecorder
from headway.engines import host_copies
from headway.models.attention import flex_attention

CUDA = torch.device("cuda", 0)
META = torch.device("meta")
"""The device of what runs backward: autograd's own threads need a CUDA device that is there. It counts like `CUDA`."""
GPU_BYTES = 80 * 2**30
NO_WORK = frozenset(
    (
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
        "new_empty_strided",
        "_unsafe_view",
        "lift_fresh",
        "item",
        "is_pinned",
        "is_same_size",
        "sym_size",
        "sym_stride",
        "sym_numel",
        "device",
        "resize_",
        "set_",
        "detach_",
    )
)
"""Names of operations that compute nothing: they take memory, or say something about a tensor."""
ATTENTION = ("attention", "varlen_attn", "flash_attn")
"""Parts of the names of operations that attend."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that passes between host and device."""

    kind: str
    """``upload``, ``download``, ``scalar`` (one number that the host reads), ``size`` (of a result, as of
    ``values[mask]``), ``pin`` or ``wait``."""
    nbytes: int = 0
    pinned: bool = False
    """True where the host's memory is page-locked."""
    waits: bool = False
    """True where the host waits for the device."""
    beside: bool = False
    """True on another stream than the one that computes."""


@dataclass(slots=True)
class Counts:
    """What was counted since the context began, or since `clear`."""

    operations: Counter[str] = field(default_factory=Counter)
    """Operations on the device, by name."""
    attention: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    """Shapes of queries and keys of each call of attention, forward; also one of the ``operations``."""
    events: list[Event] = field(default_factory=list)
    """Copies, pins and waits, in their order."""
    graphs: int = 0
    """Recordings of graphs."""
    replays: int = 0
    beside: bool = False
    """True while another stream than the one that computes is used."""

    def clear(self) -> None:
        """Begin anew."""
        self.operations.clear()
        self.attention.clear()
        self.events.clear()
        self.graphs = self.replays = 0

    @property
    def total(self) -> int:
        """All operations on the device."""
        return self.operations.total()

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    @property
    def uploads(self) -> list[Event]:
        return self.of("upload")

    @property
    def pageable(self) -> list[Event]:
        """Copies to the device from memory that is not page-locked."""
        return [event for event in self.uploads if not event.pinned]

    @property
    def downloads(self) -> list[Event]:
        """Copies from the device, single numbers included."""
        return [*self.of("download"), *self.of("scalar")]

    @property
    def waits(self) -> list[Event]:
        """Events for which the host waits for the device."""
        return [event for event in self.events if event.waits]


class _Dispatch(TorchDispatchMode):
    """Counts operations and copies. Lies above the mode that makes tensors fake."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts
        self._pinned: dict[int, Any] = {}
        """Page-locked memory by its address. Held, so that no other memory gets the same."""

    def pin(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = storage
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in ("pin_memory", "_pin_memory"):
            self.counts.events.append(Event("pin", args[0].nbytes))
            return self.pin(args[0].clone())
        if name in ("_local_scalar_dense", "item") and getattr(args[0], "constant", None) is None:
            if _on_device(args[0]):
                self.counts.events.append(Event("scalar", args[0].nbytes, waits=True))
            return _numbers(args[0]).item()
        if name == "nonzero":
            return self._nonzero(args[0])
        if name == "bincount":
            self._sized(name)
            return args[0].new_empty(max(1, kwargs.get("minlength", 0), *args[2:3]), dtype=torch.int64)
        if name == "masked_select":
            self._sized(name)
            return args[0].new_empty(args[0].numel())
        if name in ("index", "index_put", "index_put_"):
            args = (args[0], [part for index in args[1] for part in self._as_places(index)], *args[2:])
        result = func(*args, **kwargs)
        if name == "copy_":
            self._copied(args[1], args[0], args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        elif name == "_to_copy":
            self._copied(args[0], result, kwargs.get("non_blocking", False))
        elif kwargs.get("pin_memory"):
            self.pin(result)
        elif name not in NO_WORK and not func.is_view and any(map(_on_device, tree_leaves((args, kwargs, result)))):
            self.counts.operations[name] += 1
            if any(part in name for part in ATTENTION) and "backward" not in name:
                self.counts.attention.append((tuple(args[0].shape), tuple(args[1].shape)))
        return result

    def _as_places(self, index: Tensor | None) -> tuple[Tensor | None, ...]:
        if index is None or index.dtype != torch.bool:
            return (index,)
        return self._nonzero(index).unbind(1)

    def _nonzero(self, flags: Tensor) -> Tensor:
        """Places of ``flags``, as if all were set."""
        if _on_device(flags):
            self._sized("nonzero")
        return flags.new_empty((flags.numel(), flags.ndim), dtype=torch.int64)

    def _sized(self, name: str) -> None:
        """Count an operation whose result is as large as its values say: the host waits for the size."""
        self.counts.operations[name] += 1
        self.counts.events.append(Event("size", 8, waits=True))

    def _copied(self, source: Tensor, target: Tensor, non_blocking: bool) -> None:
        if _on_device(source) == _on_device(target):
            if _on_device(source):
                self.counts.operations["copy_"] += 1
        elif _on_device(target):
            pinned = self.is_pinned(source)
            self.counts.events.append(
                Event("upload", target.nbytes, pinned, not (pinned and non_blocking), self.counts.beside)
            )
        else:
            pinned = self.is_pinned(target)
            self.counts.events.append(Event("download", target.nbytes, pinned, not (pinned and non_blocking)))


class _Functions(TorchFunctionMode):
    """Stands in for what fake tensors cannot do, and what takes other ways on a GPU."""

    def __init__(self, dispatch: _Dispatch) -> None:
        super().__init__()
        self._dispatch = dispatch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.numpy:
            assert not _on_device(args[0]), "numpy() of a tensor on the device"
            return _numbers(args[0])
        if func is Tensor.tolist and isinstance(args[0], FakeTensor):
            return _numbers(args[0].cpu() if _on_device(args[0]) else args[0]).tolist()
        if func is Tensor.is_pinned:
            return self._dispatch.is_pinned(args[0])
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _attended(*args, **kwargs)
        return func(*args, **kwargs)


def _on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type in ("cuda", "meta")


def _without_grad(mode: bool = True) -> Any:
    """Stand in for `torch.inference_mode`, in which the dispatcher shows operations that are made of several as one."""
    return torch.no_grad() if mode else nullcontext()


def _numbers(tensor: Tensor) -> Any:
    """Return what the host reads of ``tensor``: 0.0, False, or 1, which is a length, too."""
    name = "float32" if tensor.dtype == torch.bfloat16 else str(tensor.dtype).removeprefix("torch.")
    dtype = np.dtype(name)
    return np.full(tensor.shape, dtype.kind in "iu", dtype)


@torch.library.custom_op("headway_counted::attention", mutates_args=())
def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    raise NotImplementedError("there are only fake tensors")


@_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


@torch.library.custom_op("headway_counted::attention_backward", mutates_args=())
def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError("there are only fake tensors")


@_attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _saved(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_attention_backward(grad, *ctx.saved_tensors), None


_attention.register_autograd(_backward, setup_context=_saved)


def _attended(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    return _attention(query, key, value, attn_mask)


def _kernel(function: Any, compiled: bool) -> Any:
    """Stand in for the kernels of FlexAttention, which are compiled for a device that is there."""
    assert compiled

    def made_mask(*_: Any, **__: Any) -> Any:
        return SimpleNamespace()

    def attended(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> tuple[Tensor, Any]:
        return _attention(query, key, value, None), SimpleNamespace()

    return made_mask if function is flex_attention.create_block_mask else attended


def _torch_cuda(counts: Counts) -> Any:
    """Stand in for `torch.cuda`: what waits is counted, the rest does nothing."""

    def wait(*_: Any) -> None:
        counts.events.append(Event("wait", waits=True))

    def made(*_: Any, **__: Any) -> Any:
        return of_stream

    def nothing(*_: Any, **__: Any) -> None:
        return None

    @contextmanager
    def used(_: Any) -> Iterator[None]:
        before, counts.beside = counts.beside, True
        yield
        counts.beside = before

    of_stream = SimpleNamespace(
        synchronize=wait,
        record=made,
        record_event=made,
        wait_stream=nothing,
        wait_event=nothing,
        wait=nothing,
        query=lambda: True,
    )
    return SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        get_device_name=lambda _: "no GPU",
        set_device=nothing,
        synchronize=wait,
        get_device_properties=lambda _: SimpleNamespace(total_memory=GPU_BYTES),
        mem_get_info=lambda *_: (GPU_BYTES, GPU_BYTES),
        memory_allocated=lambda *_: 0,
        max_memory_allocated=lambda *_: 0,
        reset_peak_memory_stats=nothing,
        empty_cache=nothing,
        Stream=made,
        Event=made,
        stream=used,
        current_stream=made,
        default_stream=made,
    )


class FakeCuda(Cuda):
    """A GPU that is not there: torch's functions for it are replaced, and what waits is counted."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._cuda = _torch_cuda(counts)

    @property
    def _torch(self) -> Any:
        return self._cuda

    def recorder(self, device: Any) -> GraphRecorder | None:
        return _Recorder(self._counts)

    def pin(self, memory: Tensor) -> Callable[[], None]:
        self._counts.events.append(Event("pin", memory.nbytes))
        return lambda: None


class _Recorder:
    """Counts recordings and replays: a replay is one launch, whose operations do not count again."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def record(self, compute: Compute) -> Compute:
        self._counts.graphs += 1
        compute()

        def replay() -> None:
            self._counts.replays += 1

        return replay

    def reset(self) -> None:
        pass


@contextmanager
def on_fake_cuda() -> Iterator[Counts]:
    """Context in which tensors are fake, and a GPU seems to be there. Yields what is counted, from now on."""
    counts = Counts()
    kind = FakeCuda(counts)
    dispatch = _Dispatch(counts)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # the same for all: 0
        stack.enter_context(patch.dict(devices.KINDS, {"cuda": kind, "meta": kind}))
        stack.enter_context(patch.object(devices, "ACCELERATORS", (kind,)))
        stack.enter_context(patch.object(flex_attention, "_kernel", _kernel))
        # Its stream is of the stand-in that made it, which counts for an earlier block.
        stack.enter_context(patch.object(host_copies, "_uploads", cache(host_copies._uploads.__wrapped__)))
        stack.enter_context(patch.object(torch, "inference_mode", _without_grad))
        stack.enter_context(patch.object(Tensor, "record_stream", lambda *_: None))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(dispatch)
        stack.enter_context(_Functions(dispatch))
        yield counts


def fake_model(cls: Any, config: Any, dtype: torch.dtype = torch.bfloat16, device: torch.device = CUDA) -> Any:
    """Make a model of ``config`` on the device, in `on_fake_cuda`: of any size, since nothing is held."""
    with torch.device(device):
        model = cls._from_config(config, dtype=dtype).eval()
    for module in model.modules():
        assert isinstance(module, nn.Module)
        for buffer in module.buffers(recurse=False):
            assert _on_device(buffer), "a buffer was left on the host"
    return model
