"""The native rollout engine: `RolloutEngine` in this process, over a Hugging Face causal LM.

    event loop                                  decoding thread (owns model and KV cache)
    ──────────                                  ─────────────────────────────────────────
    submit, pause, activate …   ──commands────▶ run between two steps ─▶ EngineCore.step()
    inboxes, answers  ◀──────────────────────── finished calls, answers

The decoding thread consumes commands, waits for one only when there is nothing to decode, and produces answers and
finished calls. Receiving weights, which blocks without decoding, runs on a thread of its own: a shared pool may have
fewer threads than there are replicas, and a transport waits for all of them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from headway.config.sizing.timeouts import close_s
from headway.data.interfaces.rollout import Capabilities, Completion, OnUpdate, Paused
from headway.devices import kind_of
from headway.engines.rollout.engine_base import ClientInbox, EngineBase, Work
from headway.engines.rollout.native.native_core import EngineCore, Finished
from headway.engines.weights.protocols import IncomingWeights
from headway.engines.weights.weight_layout import Manifest
from headway.errors import HeadwayError, NonFinite, WorkerDied

Command = tuple[Work, "Future[Any]"]
"""Work for the decoding thread, and its answer."""


class NativeEngine(EngineBase):
    """`RolloutEngine` over ``model``, which it owns: do not use the module elsewhere.

    Args:
        model: a decoder on the device that it is to be served from; its first weights are version 0.
        receive: blocking function that receives a version; a transport's end. Without it there are no updates.
        manifest: layout of the received weights.
        dual_buffer: weights arrive in a back buffer while decoding goes on: in host memory, which may be another
            process's, or on the device where they come from one. Else they are written over the served ones, for which
            the engine has to be paused or asleep.
        consume_bucket_bytes: copied at a time into the served weights; a multiple of
            `engines.weights.weight_layout.ALIGNMENT`.
        enforce_eager: on a GPU, decode without CUDA graphs (see `DecodeGraphs`).
        core: arguments of `EngineCore`.

    Raises `ModelError` for a model that it cannot serve, or whose tensors are not what ``manifest`` will bring.
    """

    capabilities = Capabilities(on_update=frozenset(OnUpdate), reproducible=True, sleep=True)

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        receive: Callable[[int, IncomingWeights], None] | None = None,
        manifest: Manifest | None = None,
        dual_buffer: bool = True,
        consume_bucket_bytes: int = 64 * 2**20,
        enforce_eager: bool = False,
        **core: Any,
    ) -> None:
        recorder = None if enforce_eager else kind_of(model.device).recorder(model.device)
        self._core = EngineCore(model, recorder=recorder, **core)
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        super().__init__(self._core.name, self._core.slots, close_s(nbytes))
        self.capabilities = replace(
            NativeEngine.capabilities, double_buffered=dual_buffer, reproducible=self._core.reproducible
        )
        if receive is not None and manifest is not None:
            self._updates = self._core.weights.updates(
                manifest, receive, consume_bucket_bytes, in_place=not dual_buffer, on_device=True
            )

        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._unanswered: list[tuple[Future[Any], Any]] = []
        """Answers of commands that were run, and their results."""
        self._pausing: list[tuple[Future[Any], Any]] = []
        """Answers to pauses, which are given when nothing decodes any more."""
        self._over = threading.Lock()
        """Lock for posting a command, and for declaring that none will be read any more."""
        self._ended: Callable[[], HeadwayError] | None = None
        self._thread = threading.Thread(target=self._serve, name=f"headway-decode-{self.name}", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------- the protocol

    async def close(self) -> None:
        """End the decoding thread; calls that are still waiting get a `RunError`. Closing twice is harmless."""
        with self._over:
            if not self._closing:
                self._closing = True
                self._commands.put(None)  # behind all commands that were posted before
                if self._updates is not None:
                    self._updates.close()
        await self._join(self._thread)

    def _run(self, work: Work) -> Future[Any]:
        answer: Future[Any] = Future()
        with self._over:
            self._check_open()
            self._commands.put((work, answer))
        return answer

    def _check_open(self) -> None:
        if self._ended is not None:
            raise self._ended()
        super()._check_open()

    # ------------------------------------------------------------------------------------- decoding thread's side

    def _serve(self) -> None:
        try:
            # In this thread, since the mode is a thread's own: without it steps are recorded for a backward pass.
            with torch.inference_mode():
                while self._obey():
                    self._deliver_all(self._core.take_finished())  # what an abort ended, before its answer
                    _answer(self._unanswered)  # before the step, for which callers need not wait
                    if self._core.has_work:
                        self._deliver_all(self._core.step())
                    if not self._core.draining:
                        _answer(self._pausing)
        except BaseException as error:  # whatever ended the thread has to reach those who wait for it
            self._end(partial(self._died, error))
        else:
            self._end(self._closed_error)

    def _obey(self) -> bool:
        """Run the commands that are there; wait for one when there is nothing to decode. False to end."""
        block = not self._core.has_work
        while True:
            try:
                command = self._commands.get(block=block)
            except queue.Empty:
                return True
            if command is None:
                return False
            block = False  # wait for the first one alone
            work, answer = command
            # Given behind all that is there: a client that asks again as soon as it has its answer would else keep
            # this loop from ending, and a run that asks for its statistics in a loop from decoding.
            self._unanswered.append((answer, None))  # also if the thread ends here
            try:
                result = work(self._core)
            except HeadwayError as error:
                result = error
            self._unanswered.pop()
            (self._pausing if isinstance(result, Paused) else self._unanswered).append((answer, result))

    def _deliver_all(self, finished: list[Finished]) -> None:
        batches: dict[ClientInbox, list[Completion]] = {}
        for client, call in finished:
            batches.setdefault(client, []).append(call)
        for client, batch in batches.items():
            client.put(batch)

    def _end(self, error: Callable[[], HeadwayError]) -> None:
        """Refuse further commands, and tell everyone who still waits."""
        with self._over:
            self._ended = error
        # From here on nothing is posted, so that what is read now is all that there will be.
        unread = [answer for answer, _ in (*self._unanswered, *self._pausing)]
        while not self._commands.empty():
            if (command := self._commands.get_nowait()) is not None:
                unread.append(command[1])
        # Not under the lock: an answer's callback may post another command, and would wait for it.
        for answer in unread:
            answer.set_exception(error())
        self._tell_clients(error())

    def _died(self, cause: BaseException) -> HeadwayError:
        if isinstance(cause, NonFinite):  # no fault of this replica's: another would find the same
            return cause
        error = WorkerDied(f"the decoding thread of rollout engine {self.name} ended: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        return error


def _answer(answers: list[tuple[Future[Any], Any]]) -> None:
    for answer, result in answers:
        if isinstance(result, HeadwayError):
            answer.set_exception(result)
        else:
            answer.set_result(result)
    answers.clear()
