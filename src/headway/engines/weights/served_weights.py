"""A copy of the policy that is served and receives new weights: by a rollout replica, or by the role ``logp``.

ServedWeights   the tensors that are served
WeightMemory    their memory, which a sleeping engine gives back
WeightUpdates   receives new versions, in a back buffer or over the served ones; `ReceiverState` tracks their progress
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from headway.data.interfaces.weights import ReceiveReport
from headway.devices import kind_of
from headway.engines.host_copies import host_buffer
from headway.engines.weights.buckets import Parts, Tensors, parts_of_files, whole
from headway.engines.weights.incoming_version import BackBuffer, InPlace, Intake
from headway.engines.weights.protocols import IncomingWeights
from headway.engines.weights.receiver_state import ReceiverState
from headway.engines.weights.weight_layout import Manifest, check_layout
from headway.errors import RunError, UpdateFailed, boundary
from headway.models.weight_files import FileTensor, file_tensors

T = TypeVar("T")


class ServedWeights:
    """The model's own tensors, their memory, and which version is in them (`state`).

    The decoding thread owns them, except while a version arrives in place: then they are the receiving thread's.
    """

    def __init__(self, files: Sequence[FileTensor], parts: Parts, device: torch.device, name: str) -> None:
        """Serve version 0: weights as they are. Messages call their owner ``name``.

        Args:
            files: the tensors of the model's files.
            parts: the served part of each: all of it, or a rank's part.
        """
        self.device = device
        self.memory = WeightMemory(part.values for own in parts.values() for part in own)
        self.state = ReceiverState(name)
        self._shapes = {file.name: file.shape for file in files}
        self._parts = parts

    @classmethod
    def of(cls, model: PreTrainedModel, name: str) -> ServedWeights:
        """Serve a ``model`` that is here as a whole."""
        parameters, files = dict(model.named_parameters()), file_tensors(model)
        return cls(files, parts_of_files(whole(parameters), files), model.device, name)

    def target(self, manifest: Manifest) -> Tensors:
        """The tensors into which flat bytes, in host memory or on the device, are written."""
        return Tensors(manifest, self._parts, None if self.device.type == "cpu" else self.device)

    def updates(
        self,
        manifest: Manifest,
        receive: Callable[[int, IncomingWeights], None],
        window: int,
        *,
        in_place: bool = False,
        on_device: bool = False,
    ) -> WeightUpdates:
        """Prepare for updates in the layout ``manifest``: in a back buffer, or ``in_place``, while nothing is computed.

        With ``on_device``, what arrives on the device stays there.

        Args:
            manifest: the layout. Raises `ModelError` where it is not this model's.
            receive: blocking function that receives a version.
            window: number of bytes that are copied at a time, a multiple of the layout's alignment.
        """
        check_layout(manifest, self._shapes, "the receiving model")
        kind, target = kind_of(self.device), self.target(manifest)
        takes = self.device if on_device else None

        def write(buffer: BackBuffer) -> None:
            for offset, part in buffer.windows(window):
                target.write(offset, part)
            kind.synchronize(self.device)  # copies are only queued: wait before reporting the version as served

        if in_place:
            pinned = kind.pins_host_memory
            over = InPlace(manifest, target, window=window, state=self.state, pinned=pinned, device=takes)
            # Restored and not only allocated: a version may fail before its first byte, and the old values then serve.
            return WeightUpdates(over, receive, self.device, take_memory=self.memory.restore)
        pin = kind.pin if kind.pins_host_memory else None
        buffer = BackBuffer(manifest, state=self.state, pin=pin, device=takes)
        return WeightUpdates(buffer, receive, self.device, take_memory=self.memory.allocate, write=write)

    def sleep(self, *, keep: bool) -> None:
        """Give the device's memory back. With ``keep`` the values move to the host; on a CPU they stay in place."""
        if not keep:
            self.memory.drop()
            self.state.lose_served()
        elif self.device.type != "cpu":
            self.memory.move_out()
        kind_of(self.device).release_cached()  # or the memory would be free for this process alone


class WeightMemory:
    """The memory behind the served weights: on the device, kept on the host, or given up.

        there ──move_out──▶ kept  (a copy on the host) ──restore──▶ there
          └───────drop────▶ gone ──allocate─────────────────────────▶ there, its values unspecified

    Whole storages are resized in place, so that all their views (projections in one packed matrix, references of the
    forward pass, tied weights) are valid again as soon as the memory is.

    Example:
        >>> weight = torch.ones(3)
        >>> memory = WeightMemory([weight])
        >>> memory.move_out()
        >>> memory.nbytes
        0
        >>> memory.restore()
        >>> weight
        tensor([1., 1., 1.])
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        # By address: tied weights and joined projections share a storage, whose size is to be changed once.
        storages = {(s := tensor.untyped_storage()).data_ptr(): s for tensor in tensors if tensor.numel()}
        self._storages = list(storages.values())
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._kept: list[torch.Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Number of bytes that the storages hold on the device now."""
        return sum(storage.nbytes() for storage in self._storages)

    @property
    def there(self) -> bool:
        return self.nbytes == sum(self._sizes)

    def move_out(self) -> None:
        """Keep the values in (page-locked) host memory, and give the device's back. Nothing if that is done already."""
        if self.there:
            # All copies before any memory is given back: one that fails leaves the weights where they are.
            self._kept = [_to_host(storage) for storage in self._storages]
            self._release()

    def drop(self) -> None:
        """Give the device's memory back without keeping the values."""
        self._kept = None
        self._release()

    def allocate(self) -> None:
        """Take the device's memory again for values that are written next; values kept on the host are forgotten."""
        self._resize()
        self._kept = None

    def restore(self) -> None:
        """Take the device's memory again, and copy the values back if they were kept."""
        self._resize()
        if self._kept is not None:
            for storage, kept in zip(self._storages, self._kept, strict=True):
                _flat(storage).copy_(kept)
        self._kept = None

    def _resize(self) -> None:
        for storage, size in zip(self._storages, self._sizes, strict=True):
            if storage.nbytes() != size:
                storage.resize_(size)

    def _release(self) -> None:
        # In place: a new storage would leave all views (joined projections, tied weights, graphs) with the old memory.
        for storage in self._storages:
            storage.resize_(0)


def _flat(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage's bytes, as a view."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _to_host(storage: torch.UntypedStorage) -> torch.Tensor:
    kept = host_buffer(storage.nbytes(), pinned=kind_of(storage.device).pins_host_memory)
    return kept.copy_(_flat(storage))


async def outcome(work: Future[T]) -> T:
    """Return the result of ``work``, which runs on a thread.

    If the waiting task is cancelled, ``work`` still runs, and its error is dropped.
    """
    waited = asyncio.wrap_future(work)
    waited.add_done_callback(lambda done: done.cancelled() or done.exception())  # or asyncio warns of a lost error
    return await asyncio.shield(waited)


@dataclass(eq=False)
class WeightUpdates:
    """Receiving and loading of versions by one `Intake`, one at a time. Versions are received on a thread of its own.

        decoding thread                 receiving thread               decoding thread, between two steps
        start (paused, if in place) ──▶ finish ◀── a transport ──────▶ load

    No thread pool is shared: it may have fewer threads than there are replicas, and a transport waits for all of them.
    """

    intake: Intake
    """The memory that versions arrive in."""
    receive: Callable[[int, IncomingWeights], None]
    """Function that receives a version, and blocks until it is there."""
    device: torch.device
    """Device of the engine."""
    take_memory: Callable[[], None] = lambda: None
    """Function that is called before served weights are written: their memory may have been given up."""
    write: Callable[[BackBuffer], None] | None = None
    """Function that writes a staged version over the served weights; None: `load` gets it as an argument."""

    def __post_init__(self) -> None:
        self._state = self.intake.state
        self._stream = kind_of(self.device).side_stream(self.device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"headway-receive-{self._state.name}")

    def start(self, version: int) -> Future[ReceiveReport]:
        """Begin to receive ``version``. Raises `UpdateFailed` while something else is under way, and if it cannot."""
        self._state.begin(version)
        try:
            if self._state.in_place:
                self._prepare(version)
            with boundary(f"{self._state.name}, which is being closed, receiving version {version}", RunError):
                # The state changes there and not where `start` is awaited: who waits may be cancelled meanwhile.
                receive = partial(self.receive, version)
                return self._thread.submit(self.intake.finish, version, receive, self._on_stream())
        except BaseException:
            self._state.fail()
            raise

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Context of the receiving thread, which has to choose its stream by itself."""
        with nullcontext() if self._stream is None else self._stream.working():
            yield
            if self._state.in_place:
                kind_of(self.device).synchronize(self.device)

    def load(self, version: int, write: Callable[[BackBuffer], None] | None = None) -> None:
        """Serve ``version``. Raises `UpdateFailed` if it was not received, or while another one is being received."""
        self._state.begin_load(version, self.intake.version)
        try:
            if isinstance(self.intake, BackBuffer):
                self._prepare(version)  # before the weights are torn: it may raise
                self._state.tear()  # until all of it is written
                write = write or self.write
                assert write is not None
                write(self.intake)
            self.intake.loaded()
        except BaseException:
            self._state.fail_load()
            raise

    def close(self) -> None:
        """Stop receiving; what is under way ends by itself."""
        self._thread.shutdown(wait=False)

    def _prepare(self, version: int) -> None:
        with boundary(f"{self._state.name} taking memory for version {version}", UpdateFailed):
            self.take_memory()
