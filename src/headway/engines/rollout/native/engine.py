"""The native rollout engine: `RolloutEngine` in this process, over a Hugging Face causal LM.

    event loop                                  decoding thread (owns model and KV cache)
    ──────────                                  ─────────────────────────────────────────
    generate, pause, activate … ──commands────▶ read between two steps ─▶ EngineCore.step()
    inboxes, answers  ◀───────────once a step── finished groups, answers

The decoding thread consumes commands, waits for one only when there is nothing to decode, and produces answers and
finished groups. Receiving weights, which blocks without decoding, runs on a thread of its own: a shared pool may have
fewer threads than there are replicas, and a transport waits for all of them.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from headway.engines.rollout.native.core import EngineCore, Finished
from headway.errors import HeadwayError, RunError, StallError, UpdateFailed, WorkerDied, boundary
from headway.interfaces import (
    Capabilities,
    EngineStats,
    FinishedGroup,
    GenerateRequest,
    Manifest,
    OnUpdate,
    Paused,
    ReceiveReport,
)
from headway.weights.buckets import BackBuffer

T = TypeVar("T")

CLOSE_TIMEOUT_S = 60.0
"""For the decoding thread to finish the step it is in."""


def _always() -> bool:
    return True


@dataclass(frozen=True, slots=True, eq=False)
class _Command:
    """Something for the decoding thread to do, and where the answer goes once ``answerable``; None if nobody asks."""

    run: Callable[[], Any]
    answerable: Callable[[], bool]
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Any] | None


@dataclass(frozen=True, slots=True, eq=False)
class _Inbox:
    """Where one `generate` call waits for its groups."""

    loop: asyncio.AbstractEventLoop
    groups: asyncio.Queue[FinishedGroup | HeadwayError]


class NativeEngine:
    """`RolloutEngine` over ``model``, which it takes over: nobody else may use the module from then on.

    Args:
        model: a decoder on the device that it is to be served from; its first weights are version 0.
        name: of the replica, in results and messages.
        seed: of the run; with a trajectory's id and a position it determines the uniform that a token is sampled with.
        slots: trajectories that decode at once.
        max_context: most tokens of prompt and response together.
        max_batched_tokens: tokens (padding included) of one prefill forward; a longer context is run alone.
        pad_token_id: fills ragged batches; never attended to.
        decode: token ids to text, for `Trajectory.text`; it gets the stop token too.
        receive: yields the buckets of a version, blocking; a transport's end. Without it there are no updates.
        manifest: the layout of those buckets.
        clock: seconds, the same clock as the events'.

    Raises `ModelError` for a model that it cannot serve, or whose tensors are not what ``manifest`` will bring.
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
        pad_token_id: int,
        decode: Callable[[Sequence[int]], str],
        receive: Callable[[int], Iterator[torch.Tensor]] | None = None,
        manifest: Manifest | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.slots = slots
        self._receive = receive
        self._core = EngineCore(
            model,
            name=name,
            seed=seed,
            slots=slots,
            max_context=max_context,
            max_batched_tokens=max_batched_tokens,
            pad_token_id=pad_token_id,
            decode=decode,
            clock=clock,
        )
        self._back: BackBuffer | None = None
        if manifest is not None:
            self._core.weights.check(manifest)
            self._back = BackBuffer(manifest)
        self._back_in_use = threading.Lock()
        """Held while the back buffer is filled, and while it is copied into the model."""
        self._receiving = ThreadPoolExecutor(1, thread_name_prefix=f"headway-receive-{name}")

        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._unanswered: list[tuple[_Command, Any]] = []
        self._inboxes: set[_Inbox] = set()
        self._outgoing: defaultdict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = defaultdict(list)
        self._over = threading.Lock()
        """Held to post a command, and to declare that none will be read any more."""
        self._ended: Callable[[], HeadwayError] | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name=f"headway-decode-{name}", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------- the protocol

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[FinishedGroup]:
        """Submit all requests at once and yield each group when it is done.

        Leaving the iterator early drops the groups that are left. Raises `DataError`, before anything is submitted,
        for a prompt that does not fit or parameters that make no sense.
        """
        inbox = _Inbox(asyncio.get_running_loop(), asyncio.Queue())
        missing = len(requests)
        try:
            await self._ask(lambda: self._submit(requests, inbox))
            while missing:
                group = await inbox.groups.get()
                if isinstance(group, HeadwayError):
                    raise group
                missing -= 1
                yield group
        finally:
            self._post(inbox.loop, lambda: self._forget(inbox))

    async def pause(self, policy: OnUpdate) -> Paused:
        """Returns when nothing decodes any more under ``policy``; at once if the engine is paused already."""
        return await self._ask(
            lambda: self._core.pause(policy), lambda: policy is not OnUpdate.DRAIN or not self._core.draining
        )

    async def resume(self) -> None:
        """Go on. Raises `RunError` while asleep."""
        await self._ask(self._core.resume)

    async def stage_weights(self, version: int) -> ReceiveReport:
        """Receive ``version`` into the back buffer while decoding goes on; raises `UpdateFailed` if that fails."""
        if self._receive is None or self._back is None:
            raise RunError(f"rollout engine {self.name} was made without a weight transport; it cannot stage weights")
        self._check_alive()
        self._take_back_buffer(version)
        with boundary(f"rollout engine {self.name} receiving version {version}", UpdateFailed):
            filling = self._receiving.submit(self._back.fill, version, self._receive(version))
            # Tied to the work and not to this call, which may be cancelled while the thread goes on.
            filling.add_done_callback(lambda _: self._back_in_use.release())
            return await asyncio.wrap_future(filling)

    async def activate(self, version: int) -> float:
        """Swap the staged ``version`` in between two steps; seconds taken. `UpdateFailed` if it is not staged."""
        return await self._ask(lambda: self._activate(version))

    async def abort(self, numbers: Sequence[int]) -> None:
        """End these training groups as they are; unknown numbers are ignored."""
        await self._ask(lambda: self._collect(self._core.abort(numbers)))

    async def abort_older_than(self, version: int) -> list[int]:
        """`abort` the training groups with a token of an older version; their numbers, in order of submission."""

        def abort() -> list[int]:
            numbers = self._core.older_than(version)
            self._collect(self._core.abort(numbers))
            return numbers

        return await self._ask(abort)

    async def in_flight(self) -> list[int]:
        """Numbers of unfinished training groups, in order of submission."""
        return await self._ask(self._core.in_flight)

    async def sleep(self) -> None:
        """Free the KV cache. Raises `RunError` unless paused. Trajectories kept in place will prefill again."""
        await self._ask(self._core.sleep)

    async def wake(self) -> None:
        """Take the KV cache's memory again; needed before `resume`."""
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
                self._receiving.shutdown(wait=False)
        await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise StallError(f"close() waited {CLOSE_TIMEOUT_S:.0f} s for rollout engine {self.name} to end its step")

    # ------------------------------------------------------------------------------------- event loop's side

    async def _ask(self, run: Callable[[], T], answerable: Callable[[], bool] = _always) -> T:
        """Run something between two steps on the decoding thread; its result, or what it raised."""
        self._check_alive()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        if not self._put(_Command(run, answerable, loop, answer)):
            self._check_alive()
        return await answer

    def _post(self, loop: asyncio.AbstractEventLoop, run: Callable[[], object]) -> None:
        """Like `_ask`, but nobody waits for it, and an engine that has ended does not care."""
        self._put(_Command(run, _always, loop, None))

    def _put(self, command: _Command) -> bool:
        with self._over:
            if self._ended is None:
                self._commands.put(command)
            return self._ended is None

    def _check_alive(self) -> None:
        if self._ended is not None:
            raise self._ended()
        if self._closing:
            raise self._closed()

    def _take_back_buffer(self, version: int) -> None:
        if not self._back_in_use.acquire(blocking=False):
            raise UpdateFailed(
                f"rollout engine {self.name} is still receiving or loading; version {version} has to wait for that"
            )

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

    def _run(self, command: _Command) -> None:
        try:
            result = command.run()
        except HeadwayError as error:
            self._outgoing[command.loop].append(partial(_fail, command.answer, error))
        except BaseException:
            self._unanswered.append((command, None))  # learns with all the others that the thread has ended
            raise
        else:
            self._unanswered.append((command, result))

    def _submit(self, requests: Sequence[GenerateRequest], inbox: _Inbox) -> None:
        self._core.submit(requests, inbox)
        self._inboxes.add(inbox)

    def _forget(self, inbox: _Inbox) -> None:
        self._core.forget(inbox)
        self._inboxes.discard(inbox)

    def _activate(self, version: int) -> float:
        self._take_back_buffer(version)
        try:
            staged = self._back.version if self._back is not None else None
            if self._back is None or staged != version:
                raise UpdateFailed(
                    f"rollout engine {self.name} was told to activate version {version}, but "
                    f"{'nothing' if staged is None else f'version {staged}'} is staged; "
                    f"call stage_weights({version}) first"
                )
            seconds = self._core.activate(version, self._back.items())
            self._back.clear()
            return seconds
        finally:
            self._back_in_use.release()

    def _collect(self, finished: list[Finished]) -> None:
        for owner, group in finished:
            assert isinstance(owner, _Inbox)
            self._outgoing[owner.loop].append(partial(owner.groups.put_nowait, group))

    def _send(self) -> None:
        """Cross to each event loop once, with the finished groups and the answers that there are for it."""
        waiting = []
        for command, result in self._unanswered:
            if command.answerable():
                self._outgoing[command.loop].append(partial(_fulfil, command.answer, result))
            else:
                waiting.append((command, result))
        self._unanswered = waiting
        self._deliver()

    def _deliver(self) -> None:
        for loop, deliveries in self._outgoing.items():
            try:
                loop.call_soon_threadsafe(_run_all, deliveries)
            except RuntimeError:
                # The loop was closed: nobody there waits any more.
                continue
        self._outgoing = defaultdict(list)

    def _end(self, error: Callable[[], HeadwayError]) -> None:
        """Refuse further commands, and tell everyone who still waits."""
        with self._over:
            self._ended = error
        unread = []
        while not self._commands.empty():
            if (command := self._commands.get_nowait()) is not None:
                unread.append(command)
        for command in [*unread, *(command for command, _ in self._unanswered)]:
            self._outgoing[command.loop].append(partial(_fail, command.answer, error()))
        for inbox in self._inboxes:
            self._outgoing[inbox.loop].append(partial(inbox.groups.put_nowait, error()))
        self._deliver()

    def _died(self, cause: BaseException) -> WorkerDied:
        error = WorkerDied(f"the decoding thread of rollout engine {self.name} ended: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        return error

    def _closed(self) -> RunError:
        return RunError(f"rollout engine {self.name} is closed")


def _run_all(deliveries: list[Callable[[], None]]) -> None:
    for deliver in deliveries:
        deliver()


def _fulfil(answer: asyncio.Future[Any] | None, result: Any) -> None:
    if answer is not None and not answer.done():
        answer.set_result(result)


def _fail(answer: asyncio.Future[Any] | None, error: HeadwayError) -> None:
    if answer is not None and not answer.done():
        answer.set_exception(error)
