"""The link to vLLM: orders to it, what it answers, and its end, which reaches everybody who waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from headway.errors import HeadwayError, RunError, WorkerDied

T = TypeVar("T")


class VllmLink:
    """One engine of vLLM's, as long as it lives. Driven from its loop alone.

    Args:
        llm: an ``AsyncLLM`` of the running loop.
        name: of the replica, in messages.
        on_end: called once with why the engine ended.
    """

    def __init__(self, llm: Any, name: str, on_end: Callable[[HeadwayError], None]) -> None:
        self._llm = llm
        self._name = name
        self._on_end = on_end
        self.over: HeadwayError | None = None
        """The error that the engine ended with; None before."""
        self._ended = asyncio.Event()

    def watch(self) -> None:
        """Notice vLLM's end, even while it is idle."""
        if (handler := getattr(self._llm, "output_handler", None)) is not None:
            handler.add_done_callback(lambda _: self._lost())

    async def tell(self, what: str, order: Coroutine[Any, Any, T], error: type[HeadwayError] = RunError) -> T:
        """vLLM's answer to an ``order`` to do ``what``, or what this engine ended with: a dead vLLM never answers.

        Raises ``error`` for what vLLM raises; its end ends this engine.
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
            answer.cancel()
            ended.cancel()

    def attributed(self, what: str, cause: Exception, error: type[HeadwayError]) -> HeadwayError:
        """The error for what vLLM raised when told to do ``what``: `WorkerDied` if it is dead, else ``error``."""
        detail = f"{type(cause).__name__}: {cause}"
        if self._llm.errored:
            dead = WorkerDied(f"vLLM's processes of rollout engine {self._name} ended when told to {what}: {detail}")
            dead.__cause__ = cause
            return dead
        failed = error(f"rollout engine {self._name}: vLLM was told to {what}: {detail}")
        failed.__cause__ = cause
        return failed

    def end(self, error: HeadwayError) -> None:
        """End the engine with ``error``, which every waiting and every later caller gets."""
        if self.over is None:
            self.over = error
            self._ended.set()
            self._on_end(error)

    def check(self) -> None:
        """Raise what the engine ended with, if it did."""
        if self.over is None and self._llm.errored:
            self._lost()
        if self.over is not None:
            raise self.over

    def _lost(self) -> None:
        """End with the error for outputs of vLLM's that have ended: by its death, unless this engine ended before."""
        self.end(WorkerDied(f"vLLM's processes of rollout engine {self._name} have ended; its own output says why"))
