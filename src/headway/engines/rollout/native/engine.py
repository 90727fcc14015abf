"""The native rollout engine: `RolloutEngine` in this process, over a Hugging Face causal LM.

    event loop                                  decoding thread (owns model and KV cache)
    ──────────                                  ─────────────────────────────────────────
    submit, pause, activate …   ──commands────▶ read between two steps ─▶ EngineCore.step()
    inboxes, answers  ◀───────────once a step── finished calls, answers

The decoding thread consumes commands, waits for one only when there is nothing to decode, and produces answers and
finished calls. Receiving weights, which blocks without decoding, runs on a thread of its own: a shared pool may have
fewer threads than there are replicas, and a transport waits for all of them.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from headway.config.sizing.timeouts import close_s
from headway.data.interfaces.rollout import Capabilities, EngineStats, FinishedCall, GenerateRequest, OnUpdate, Paused
from headway.data.interfaces.weights import ReceiveReport
from headway.data.types import TrajectoryId
from headway.devices import kind_of
from headway.engines.rollout.call_run import CallInbox, Inboxes
from headway.engines.rollout.native.native_core import EngineCore, Finished
from headway.engines.weights.protocols import IncomingWeights
from headway.engines.weights.served_weights import WeightUpdates, cannot_stage, nothing_to_activate, outcome
from headway.engines.weights.weight_layout import ALIGNMENT, Manifest
from headway.errors import (
    ConfigError,
    HeadwayError,
    NonFinite,
    RunError,
    StallError,
    UpdateFailed,
    WorkerDied,
    boundary,
)


def always() -> bool:
    """Tell that there is nothing to wait for."""
    return True


@dataclass(frozen=True, slots=True, eq=False)
class Command:
    """Function for the decoding thread to run. ``answer``, if any, gets its result once ``answerable``."""

    run: Callable[[], Any]
    answerable: Callable[[], bool]
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Any] | None


class Deliveries:
    """Deliveries to event loops, which `send` crosses to once for all that there is. Belongs to one thread."""

    def __init__(self) -> None:
        self._of: defaultdict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = defaultdict(list)

    def put(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[], Any]) -> None:
        """Let ``loop`` call ``deliver``."""
        self._of[loop].append(deliver)

    def answer(self, command: Command, result: Any) -> None:
        """Answer a command, with an error where ``result`` is one."""
        self.put(command.loop, partial(_answer, command.answer, result))

    def send(self) -> None:
        """Deliver everything."""
        if not self._of:
            return
        for loop, deliveries in self._of.items():
            try:
                loop.call_soon_threadsafe(_run_all, deliveries)
            except RuntimeError:
                # The loop was closed: nobody there waits any more.
                continue
        self._of = defaultdict(list)


def _run_all(deliveries: list[Callable[[], Any]]) -> None:
    for deliver in deliveries:
        deliver()


def _answer(answer: asyncio.Future[Any] | None, result: Any) -> None:
    if answer is None or answer.done():
        return
    if isinstance(result, HeadwayError):
        answer.set_exception(result)
    else:
        answer.set_result(result)


T = TypeVar("T")


class NativeEngine:
    """`RolloutEngine` over ``model``, which it owns: do not use the module elsewhere.

    Args:
        model: a decoder on the device that it is to be served from; its first weights are version 0.
        name: of the replica, in results and messages.
        seed: of the run; with a trajectory's id, a call's key and a position it determines the uniform that a token is
            sampled with.
        slots: calls that decode at once.
        max_context: most tokens of context and continuation together.
        max_batched_tokens: prefilled in one step, unless one context alone is longer.
        kv_cache_bytes: for rows that decode and contexts kept for later calls, together. Where they are short, contexts
            are prefilled again, and calls wait or are parked. Default: enough for ``slots`` of either kind.
        enforce_eager: on a GPU, decode without CUDA graphs (see `DecodeGraphs`).
        decode: token ids to text, to find stop strings; it gets the stop token too.
        receive: lets a version come in, blocking; a transport's end. Without it there are no updates.
        manifest: the layout of what it brings.
        dual_buffer: weights arrive in a back buffer in host memory, which may be another process's, while decoding
            goes on. Else they are written over the served ones, for which the engine has to be paused or asleep.
        consume_bucket_bytes: copied at a time into the served weights; a multiple of
        `engines.weights.weight_layout.ALIGNMENT`. temperature: of the run's sampling, for `probe`; each request has its
        own. clock: seconds, the same clock as the events'.

    Raises `ModelError` for a model that it cannot serve, or whose tensors are not what ``manifest`` will bring, and
    `ConfigError` for a ``consume_bucket_bytes`` that does not fit.
    """

    capabilities = Capabilities(on_update=frozenset(OnUpdate), reproducible=True, sleep=True)

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        name: str,
        seed: int,
        slots: int,
        max_context: int,
        max_batched_tokens: int,
        kv_cache_bytes: int | None = None,
        enforce_eager: bool = False,
        decode: Callable[[Sequence[int]], str],
        receive: Callable[[int, IncomingWeights], None] | None = None,
        manifest: Manifest | None = None,
        dual_buffer: bool = True,
        consume_bucket_bytes: int = 64 * 2**20,
        temperature: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = self.copy = name
        self.slots = slots
        if consume_bucket_bytes <= 0 or consume_bucket_bytes % ALIGNMENT:
            raise ConfigError(
                f"weights are copied by a positive multiple of {ALIGNMENT} bytes; {consume_bucket_bytes} was given "
                "(see rollout.param_update_consume_bucket_size_mb)"
            )
        self._core = EngineCore(
            model,
            name=name,
            seed=seed,
            slots=slots,
            max_context=max_context,
            max_batched_tokens=max_batched_tokens,
            kv_cache_bytes=kv_cache_bytes,
            recorder=None if enforce_eager else kind_of(model.device).recorder(model.device),
            decode=decode,
            clock=clock,
            temperature=temperature,
        )
        self.capabilities = replace(
            NativeEngine.capabilities, double_buffered=dual_buffer, reproducible=self._core.reproducible
        )
        self._updates: WeightUpdates | None = None
        if receive is not None and manifest is not None:
            self._updates = self._core.weights.updates(
                manifest, receive, consume_bucket_bytes, in_place=not dual_buffer
            )

        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._unanswered: list[tuple[Command, Any]] = []
        self._inboxes = Inboxes(name)
        self._clients: dict[str, CallInbox] = {}
        """The inboxes that the decoding thread fills, by client."""
        self._outgoing = Deliveries()
        self._over = threading.Lock()
        """Held to post a command, and to declare that none will be read any more."""
        self._ended: Callable[[], HeadwayError] | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name=f"headway-decode-{name}", daemon=True)
        self._close_s = close_s(sum(parameter.nbytes for parameter in model.parameters()))
        self._thread.start()

    # ------------------------------------------------------------------------------------- the protocol

    async def submit(self, client: str, calls: Sequence[GenerateRequest]) -> None:
        """Submit all calls at once.

        Raises `DataError`, and submits nothing, for a context that does not fit or parameters that make no sense.
        """
        inbox = self._inboxes.of(client)
        await self._ask(lambda: self._submit(inbox, calls))

    async def finished(self, client: str) -> AsyncIterator[Sequence[FinishedCall]]:
        """Yield the finished calls of ``client``, in batches. Leaving it drops the client's other calls.

        Raises `RunError` where another iterator of this client is open.
        """
        with self._inboxes.reading(client) as inbox:
            try:
                await self._ask(lambda: self._attend(inbox))
                while True:
                    yield await inbox.next()
            finally:
                # Without an answer: the client is leaving, and an engine that has ended has nothing to drop.
                self._put(Command(lambda: self._leave(inbox), always, inbox.loop, None))

    async def drop(self, client: str) -> None:
        """Drop all calls of a client that is gone, and end its `finished`."""
        if (inbox := self._inboxes.end(client)) is not None:
            await self._ask(lambda: self._leave(inbox))

    async def pause(self, policy: OnUpdate) -> Paused:
        """Returns when nothing decodes any more under ``policy``; at once if the engine is paused already."""
        return await self._ask(
            lambda: self._core.pause(policy), lambda: policy is not OnUpdate.DRAIN or not self._core.draining
        )

    async def resume(self) -> None:
        """Resume decoding. Raises `RunError` while asleep, and while no whole version is active."""
        await self._ask(self._core.resume)

    async def stage_weights(self, version: int) -> ReceiveReport:
        """Receive ``version``. Raises `UpdateFailed` if that fails, or while another version is received or loaded.

        With a back buffer the engine decodes meanwhile; after an error it serves the old version with nothing staged.
        Without one it has to be paused or asleep; after an error half-way it serves nothing until a version has come.
        """
        if (updates := self._updates) is None:
            raise cannot_stage(self.name)
        self._check_alive()
        if self.capabilities.double_buffered:
            filling = updates.start(version)
        else:
            # On the decoding thread, so that nothing can resume between the check and the writing.
            filling = await self._ask(lambda: self._start_writing(updates, version))
        with boundary(f"rollout engine {self.name} receiving version {version}", UpdateFailed):
            return await outcome(filling)

    async def activate(self, version: int) -> float:
        """Serve ``version`` from the next step on; seconds taken. `UpdateFailed` if it is not what was staged."""
        return await self._ask(lambda: self._activate(version))

    async def probe(self) -> NDArray[np.float32] | None:
        """The log-probs [8] of `headway.models.logprobs` through prefill and decoding as they are served.

        None where a context is too short for them. Raises `RunError` while there are no whole weights on the device.
        """
        return await self._ask(self._core.probe)

    async def abort(self, client: str, numbers: Sequence[int]) -> None:
        """End these calls of ``client`` as they are; unknown numbers are ignored."""
        await self._ask(lambda: self._collect(self._core.abort(client, numbers)))

    async def abort_older_than(self, version: int) -> None:
        """End the unfinished training calls with a token of an older version."""
        await self._ask(lambda: self._collect(self._core.abort_older_than(version)))

    async def release(self, trajectories: Sequence[TrajectoryId]) -> None:
        """Give up what is kept for further calls of these episodes."""
        await self._ask(lambda: self._core.release(trajectories))

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Free the KV cache, and on a GPU the weights' memory; what was kept in place is prefilled again.

        The weights are kept in host memory, where those of a CPU are anyway. Without ``keep_weights`` they are lost,
        their memory is free on a CPU too, and the next version that is activated brings them back. Raises `RunError`
        unless paused, and while weights are written in place.
        """
        await self._ask(lambda: self._core.sleep(keep_weights=keep_weights))

    async def wake(self) -> None:
        """Take the memory again, and the weights that were kept; needed before `resume`."""
        await self._ask(self._core.wake)

    async def stats(self) -> EngineStats:
        """Activity since the last call."""
        return await self._ask(self._core.stats)

    async def close(self) -> None:
        """End the decoding thread; calls that are still waiting get a `RunError`. Closing twice is harmless."""
        with self._over:
            if not self._closing:
                self._closing = True
                self._commands.put(None)
                if self._updates is not None:
                    self._updates.close()
        await asyncio.to_thread(self._thread.join, self._close_s)
        if self._thread.is_alive():
            raise StallError(f"close() waited {self._close_s:.0f} s for rollout engine {self.name} to end its step")

    # ------------------------------------------------------------------------------------- event loop's side

    async def _ask(self, run: Callable[[], T], answerable: Callable[[], bool] = always) -> T:
        """Run something between two steps on the decoding thread; its result, or what it raised."""
        self._check_alive()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        if not self._put(Command(run, answerable, loop, answer)):  # it ended since the check: nothing would answer
            self._check_alive()
        return await answer

    def _put(self, command: Command) -> bool:
        with self._over:
            if self._ended is None:
                self._commands.put(command)
            return self._ended is None

    def _check_alive(self) -> None:
        if self._ended is not None:
            raise self._ended()
        if self._closing:
            raise self._closed()

    # ------------------------------------------------------------------------------------- decoding thread's side

    def _serve(self) -> None:
        try:
            with torch.inference_mode():
                while self._obey():
                    self._send()  # before the step: no answer has to wait for it
                    if self._core.has_work:
                        self._collect(self._core.step())
                        self._send()
        except BaseException as error:  # whatever ended the thread has to reach those who wait for it
            self._end(partial(self._died, error))
        else:
            self._end(self._closed)

    def _obey(self) -> bool:
        """Run the commands that are there; wait for one when there is nothing to decode. False to end."""
        command = None
        while True:
            try:
                command = self._commands.get(block=command is None and not self._core.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._run(command)

    def _run(self, command: Command) -> None:
        try:
            result = command.run()
        except HeadwayError as error:
            self._outgoing.answer(command, error)
        except BaseException:
            self._unanswered.append((command, None))  # learns with all the others that the thread has ended
            raise
        else:
            self._unanswered.append((command, result))

    def _submit(self, inbox: CallInbox, calls: Sequence[GenerateRequest]) -> None:
        self._attend(inbox)
        self._core.submit(inbox.client, calls)

    def _attend(self, inbox: CallInbox) -> None:
        self._clients[inbox.client] = inbox

    def _leave(self, inbox: CallInbox) -> None:
        if self._clients.get(inbox.client) is inbox:
            del self._clients[inbox.client]
            self._core.forget(inbox.client)

    def _start_writing(self, updates: WeightUpdates, version: int) -> Future[ReceiveReport]:
        self._core.check_paused(f"receive version {version}")
        return updates.start(version)

    def _activate(self, version: int) -> float:
        updates = self._updates
        if updates is None:
            raise nothing_to_activate(self.name, version)
        return self._core.activate(version, lambda: updates.load(version))

    def _collect(self, finished: list[Finished]) -> None:
        batches: dict[str, list[FinishedCall]] = {}
        for client, call in finished:
            batches.setdefault(client, []).append(call)
        for client, batch in batches.items():
            if (inbox := self._clients.get(client)) is not None:
                self._outgoing.put(inbox.loop, partial(inbox.batches.put_nowait, batch))

    def _send(self) -> None:
        """Cross to each event loop once, with the finished calls and the answers that there are for it."""
        waiting = []
        for command, result in self._unanswered:
            if command.answerable():
                self._outgoing.answer(command, result)
            else:
                waiting.append((command, result))
        self._unanswered = waiting
        self._outgoing.send()

    def _end(self, error: Callable[[], HeadwayError]) -> None:
        """Refuse further commands, and tell everyone who still waits."""
        with self._over:
            self._ended = error
        # From here on nothing is posted, so that what is read now is all that there will be.
        unread = []
        while not self._commands.empty():
            if (command := self._commands.get_nowait()) is not None:
                unread.append(command)
        for command in [*unread, *(command for command, _ in self._unanswered)]:
            self._outgoing.answer(command, error())
        for inbox in self._clients.values():
            self._outgoing.put(inbox.loop, partial(inbox.batches.put_nowait, error()))
        self._outgoing.send()

    def _died(self, cause: BaseException) -> HeadwayError:
        if isinstance(cause, NonFinite):  # no fault of this replica's: another would find the same
            return cause
        error = WorkerDied(f"the decoding thread of rollout engine {self.name} ended: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        return error

    def _closed(self) -> RunError:
        return RunError(f"rollout engine {self.name} is closed")
