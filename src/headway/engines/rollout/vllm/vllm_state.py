"""State of one vLLM: whether it is paused, what its caches and weights hold, and how it ended.

           halt(clear: the cache is emptied, all is computed again)
decoding ──────────────────▶ halted ──sleep──▶ asleep: no cache; weights kept elsewhere, or gone
    ▲                         │  ▲               │
    └──────────go_on──────────┘  └─────wake──────┘      load: while halted or asleep
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from headway.engines.weights.receiver_state import ReceiverState
from headway.errors import HeadwayError, ModelError, RunError, UpdateFailed, WorkerDied

T = TypeVar("T")


WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""vLLM's tags of the memory that it gives up when it sleeps."""


@dataclass(eq=False)
class VllmState:
    """State of one vLLM: version, pause, sleep, and its final error, which every waiting caller gets.

    Used only on vLLM's loop. Callers must not run two changes at once.
    """

    llm: Any
    """An ``AsyncLLM`` of the running loop."""
    name: str
    """Name of the replica, in messages."""
    weights: ReceiverState
    """State of the weights that vLLM's workers hold; `WeightUpdates` changes it."""
    on_end: Callable[[HeadwayError], None]
    """Called once with why the engine ended."""
    on_halted: Callable[[], None]
    """Called when vLLM is paused or resumed."""
    on_cleared: Callable[[], None]
    """Called when all keys and values are gone."""
    over: HeadwayError | None = None
    """The error that the engine ended with; None before."""
    version: int = 0
    """The version of the weights, stamped on what is sampled."""
    halted: bool = False
    """True while vLLM is paused."""
    cleared: bool = False
    """True while vLLM is paused and all keys and values are gone."""

    def __post_init__(self) -> None:
        self._ended = asyncio.Event()
        self._sleeping: list[str] = []
        """Sleeping parts of its memory, as vLLM's tags. It wakes as a whole, or weights first if new ones arrive."""

    # ------------------------------------------------------------------------------------- orders, and vLLM's end

    async def tell(self, what: str, order: Coroutine[Any, Any, T], error: type[HeadwayError] = RunError) -> T:
        """Return vLLM's answer to ``order``, which ``what`` describes. Raises the engine's final error if it ends.

        Raises ``error`` if vLLM raises. A dead vLLM never answers: its death ends this engine.
        """
        answer = asyncio.create_task(order)
        ended = asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait((answer, ended), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                self.check()
            return await answer
        except HeadwayError:
            raise
        except Exception as cause:
            attributed = self.attributed(what, cause, error)
            if isinstance(attributed, WorkerDied):
                self.end(attributed)
            raise attributed from cause
        finally:
            # A dead vLLM never answers: each order would leave a task behind.
            answer.cancel()
            ended.cancel()

    def attributed(self, what: str, cause: Exception, error: type[HeadwayError]) -> HeadwayError:
        """The error for what vLLM raised when told to do ``what``: `WorkerDied` if it is dead, else ``error``."""
        detail = f"{type(cause).__name__}: {cause}"
        if self.llm.errored:
            error, said = WorkerDied, f"vLLM's processes of rollout engine {self.name} ended when told to {what}"
        else:
            said = f"rollout engine {self.name}: vLLM was told to {what}"
        failed = error(f"{said}: {detail}")
        failed.__cause__ = cause
        return failed

    def end(self, error: HeadwayError) -> None:
        """End the engine with ``error``, which every waiting and every later caller gets."""
        if self.over is None:
            # Set before anyone is notified: callers that wake up ask for the error.
            self.over = error
            self._ended.set()
            self.on_end(error)

    def check(self) -> None:
        """Raise the engine's final error if it has ended."""
        if self.over is None and self.llm.errored:
            self._lost()
        if self.over is not None:
            raise self.over

    def _lost(self) -> None:
        """End the engine because vLLM's outputs have ended: vLLM died, unless this engine ended before."""
        self.end(WorkerDied(f"vLLM's processes of rollout engine {self.name} have ended; its own output says why"))

    # ------------------------------------------------------------------------------------- its state

    @property
    def asleep(self) -> bool:
        """True until `wake`: nothing is computed."""
        return bool(self._sleeping)

    async def begin(self) -> None:
        """Begin with the first weights, version 0. Raises `ModelError` if vLLM cannot compute with the loaded model."""
        if (handler := getattr(self.llm, "output_handler", None)) is not None:  # it ends with vLLM, also while idle
            handler.add_done_callback(lambda _: self._lost())
        await self.tell("start", self.llm.get_supported_tasks())  # kept by vLLM: requests then register at once
        await self.tell("start", self.llm.update_weight_version("0"))
        first = self.llm.collective_rpc("headway_score", args=([[0, 0]], [0], 1.0))
        await self.tell("compute with the model", first, ModelError)

    async def connect(self, nbytes: int, slots: list[tuple[str, list[int], str, int, int]]) -> None:
        """Send the workers the layout of the buffers that they will map."""
        from vllm.distributed.weight_transfer.base import (  # type: ignore[import-not-found]
            WeightTransferInitRequest,
        )

        request = WeightTransferInitRequest({"nbytes": nbytes, "slots": slots})
        told = self.llm.init_weight_transfer_engine(request)
        await self.tell("prepare for new weights", told, UpdateFailed)

    async def halt(self, *, clear: bool) -> None:
        """Pause vLLM and collect the outputs under way. ``clear`` also empties the cache: all is prefilled again."""
        if self.halted and (self.cleared or not clear):
            return
        await self.tell("pause", self.llm.pause_generation(mode="keep", clear_cache=clear))
        self.halted, self.cleared = True, clear
        if clear:
            self.on_cleared()
        self.on_halted()

    async def go_on(self) -> None:
        """End a pause."""
        if self.halted:
            await self.tell("go on", self.llm.resume_generation())
            self.halted = self.cleared = False
            self.on_halted()

    async def load(self, version: int, path: str) -> None:
        """Have the workers load ``version`` from a buffer. Raises `UpdateFailed`; the weights are then torn."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        async def load() -> None:
            if WEIGHTS in self._sleeping:
                await self.llm.wake_up([WEIGHTS])
                self._sleeping.remove(WEIGHTS)  # once: vLLM takes memory for whatever it is told to wake
            await self.llm.start_weight_update()
            await self.llm.update_weights(WeightTransferUpdateRequest({"version": version, "path": path}))
            await self.llm.finish_weight_update(str(version))

        # The version last: if the load fails the old one stays, so that no token is stamped with a torn version.
        await self.tell(f"load version {version}", load(), UpdateFailed)
        self.version = version

    async def sleep(self, *, keep_weights: bool) -> None:
        """Free the device's memory."""
        if not self.asleep:
            await self.tell("sleep", self.llm.sleep(level=1 if keep_weights else 2, mode="keep"))
            self.on_cleared()
            self._sleeping = [WEIGHTS, KV_CACHE]
        if not keep_weights:
            self.weights.lose_served()

    async def wake(self) -> None:
        """Take the device's memory back; still paused."""
        if self.asleep:
            await self.tell("wake", self.llm.wake_up(list(self._sleeping)))
            # Waking lets it go on.
            await self.tell("pause", self.llm.pause_generation(mode="keep", clear_cache=True))
            self._sleeping, self.cleared = [], True

    async def score(
        self, contexts: Sequence[Sequence[int]], tokens: Sequence[int], temperature: float
    ) -> NDArray[np.float32]:
        """The log-prob of each of ``tokens`` behind its context, in steps of their own, while vLLM stands still."""
        scoring = self.llm.collective_rpc("headway_score", args=(contexts, tokens, temperature))
        scores = await self.tell("compute the probe's log-probs", scoring)
        return np.array(next((s for s in scores if s), []), np.float32)

    def check_computes(self, doing: str) -> None:
        """Raise `RunError`, which names ``doing``, while asleep or without a complete version to compute with."""
        if self.asleep:
            raise RunError(f"rollout engine {self.name} was told to {doing} while asleep; call wake() first")
        self.weights.check(doing)
