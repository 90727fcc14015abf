"""A stream of the device for what a receiving thread does, so that decoding does not wait for weights that arrive.

    default stream    decode ▷ decode ▷ decode ▷ decode ▷ load ▷ decode
    side stream          └▷ receive ▷ copy ▷ receive ▷ copy │ host waits, then reports the version as received

Work of one stream runs in order: buckets on the default stream would queue behind decoding steps, and steps behind
buckets. On a CPU there are no streams, and nothing is done.

Serving new weights: beside those that decode, or over them; one version at a time.

decoding thread, paused      receiving thread            decoding thread, between two steps
begin (`InPlaceIntake`) ───▶ fill ◀── a transport ─────▶ load
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Protocol, TypeVar

import torch

from headway.data.interfaces.weights import ReceiveReport
from headway.devices import DeviceStream as Stream
from headway.devices import kind_of
from headway.engines.weights.incoming_version import BackBuffer, InPlace, Receive
from headway.engines.weights.protocols import IncomingWeights
from headway.engines.weights.served_weights import Contents, ServedWeights
from headway.engines.weights.weight_layout import Manifest
from headway.errors import RunError, UpdateFailed, boundary

T = TypeVar("T")


async def outcome(work: Future[T]) -> T:
    """Return the result of ``work``, which runs on a thread.

    If the waiting task is cancelled, ``work`` still runs, and its error is dropped.
    """
    waited = asyncio.wrap_future(work)
    waited.add_done_callback(lambda done: done.cancelled() or done.exception())  # else asyncio says that nobody heard
    return await asyncio.shield(waited)


class Intake(Protocol):
    """The memory that receives new weights, and the way from there to where they are served. Not thread-safe."""

    def begin(self, version: int) -> None:
        """Prepare for `fill`; nothing may decode where that writes over served weights. Raises `UpdateFailed`."""

    def fill(self, version: int, receive: Receive) -> ReceiveReport:
        """Receive ``version`` by calling ``receive``. Blocking; called on a separate thread."""

    def load(self, version: int) -> None:
        """Serve ``version``. Raises `UpdateFailed`, changing nothing, if it is not the version received last."""


class BufferedIntake:
    """Receives into a back buffer and loads from there: the old version stays served if anything goes wrong."""

    def __init__(self, name: str, weights: ServedWeights, manifest: Manifest, window: int) -> None:
        """Make the back buffer. ``window``: bytes copied at a time, a multiple of the layout's alignment."""
        self._name = name
        self._weights = weights
        self._window = window
        self._target = weights.target(manifest)
        self._back = BackBuffer(manifest, pin=kind_of(weights.device).pin)

    def begin(self, version: int) -> None:
        """Do nothing: the served weights are not touched before `load`."""

    def fill(self, version: int, receive: Receive) -> ReceiveReport:
        return self._back.fill(version, receive)

    def load(self, version: int) -> None:
        if self._back.version != version:
            raise not_staged(self._name, version, self._back.version)
        with boundary(f"{self._name} taking memory for version {version}", UpdateFailed):
            self._weights.memory.allocate()
        self._weights.set(Contents.TORN, version)  # until all of it is written
        for offset, window in self._back.windows(self._window):
            self._target.write(offset, window)
        kind_of(self._weights.device).synchronize(self._weights.device)
        self._back.loaded()
        self._weights.set(Contents.SERVED, version)


class InPlaceIntake:
    """Receives straight into the served tensors, in which there is no whole version until all of it has come."""

    def __init__(self, name: str, weights: ServedWeights, manifest: Manifest, window: int) -> None:
        """Prepare to write into ``weights``. ``window``: bytes that are copied at a time, as for `BufferedIntake`."""
        self._name = name
        self._weights = weights
        pinned = kind_of(weights.device).pins_host_memory
        self._into = InPlace(manifest, weights.target(manifest), window=window, pinned=pinned)
        self._before = (weights.contents, weights.version)

    def begin(self, version: int) -> None:
        with boundary(f"{self._name} taking memory for version {version}", UpdateFailed):
            self._weights.memory.restore()
        self._before = (self._weights.contents, self._weights.version)
        self._into.torn = False
        self._weights.set(Contents.WRITING, version)

    def fill(self, version: int, receive: Receive) -> ReceiveReport:
        try:
            report = self._into.fill(version, receive)
        except BaseException:
            if self._into.torn:
                self._weights.set(Contents.TORN, version)
            else:
                self._weights.set(*self._before)
            raise
        kind_of(self._weights.device).synchronize(self._weights.device)
        self._weights.set(Contents.ARRIVED, version)
        return report

    def load(self, version: int) -> None:
        weights = self._weights
        if weights.contents is Contents.TORN:
            raise UpdateFailed(f"{self._name} cannot activate version {version}: {weights.problem}")
        arrived = weights.version if weights.contents is Contents.ARRIVED else None
        if arrived != version:
            raise not_staged(self._name, version, arrived)
        weights.set(Contents.SERVED, version)


class Updates:
    """Receives and loads versions with one `Intake`, one at a time; receives on its own thread.

    A shared pool may have fewer threads than there are replicas, and a transport waits for all of them.
    """

    def __init__(
        self,
        name: str,
        intake: Intake,
        receive: Callable[[int, IncomingWeights], None],
        device: torch.device,
    ) -> None:
        """Set up a receiving thread. ``receive`` lets a version come in, blocking; ``device`` is the engine's."""
        self._name = name
        self._way_in = intake
        self._receive = receive
        self._stream = SideStream(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"headway-receive-{name}")
        self._busy = threading.Lock()
        self._doing = ""

    def start(self, version: int) -> Future[ReceiveReport]:
        """Begin to receive ``version``. Raises `UpdateFailed` while something else is under way, and if it cannot."""
        self._claim("receiving", version)
        try:
            self._way_in.begin(version)
            with boundary(f"{self._name}, which is being closed, receiving version {version}", RunError):
                filling = self._thread.submit(self._fill, version)
        except BaseException:
            self._busy.release()
            raise
        # Tied to the work and not to whoever waits for it, who may be cancelled while the thread goes on.
        filling.add_done_callback(lambda _: self._busy.release())
        return filling

    def _fill(self, version: int) -> ReceiveReport:
        """Receive ``version`` on the receiving thread, which has to choose its stream by itself."""
        with self._stream.working():
            return self._way_in.fill(version, partial(self._receive, version))

    def load(self, version: int) -> None:
        """Serve ``version``. Raises `UpdateFailed` if it was not received, or while another one is being received."""
        self._claim("loading", version)
        try:
            self._way_in.load(version)
        finally:
            self._busy.release()

    def close(self) -> None:
        """Stop receiving; what is under way ends by itself."""
        self._thread.shutdown(wait=False)

    def _claim(self, doing: str, version: int) -> None:
        if not self._busy.acquire(blocking=False):
            raise UpdateFailed(f"{self._name} is still {self._doing}; {doing} version {version} has to wait for that")
        self._doing = f"{doing} version {version}"


def cannot_stage(name: str) -> RunError:
    """The error for a rollout engine that has no weight transport and is asked to receive weights."""
    return RunError(f"rollout engine {name} was made without a weight transport; it cannot stage weights")


def nothing_to_activate(name: str, version: int) -> UpdateFailed:
    """The error for a rollout engine that has no weight transport and is asked to activate ``version``."""
    return UpdateFailed(
        f"rollout engine {name} was told to activate version {version}, but nothing is staged: it was made without a "
        "weight transport"
    )


def not_staged(name: str, version: int, staged: int | None) -> UpdateFailed:
    """The error for a receiver that is asked to load ``version`` while it has ``staged``, or nothing."""
    return UpdateFailed(
        f"{name} was told to activate version {version}, but "
        f"{'nothing' if staged is None else f'version {staged}'} is staged; call stage_weights({version}) first"
    )


class SideStream:
    """A stream on ``device`` for a receiving thread, made when first used. On a CPU it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Stream | None = None

    @contextmanager
    def working(self) -> Iterator[None]:
        """Run the work inside on the side stream; it has ended on the device when the block has.

        It begins behind what the default stream was given so far, which may still read the tensors that are written.
        Other streams need no event: they are only told of the tensors after the host has waited. For the same reason
        no memory is recorded for a second stream: what was taken inside is given back to the stream that used it, and
        no tensor of another stream can be freed and taken again while work here still writes it.
        """
        if self._stream is None:
            self._stream = kind_of(self._device).side_stream(self._device)
        if self._stream is None:
            yield
            return
        self._stream.wait_for_default()
        try:
            with self._stream.working():
                yield
        except BaseException:
            with suppress(RuntimeError):  # what went wrong first is the reason
                self._stream.synchronize()
            raise
        self._stream.synchronize()
