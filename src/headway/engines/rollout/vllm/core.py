"""The trajectories that vLLM runs, what an update does to them, and what becomes of them: everything here happens on
vLLM's event loop.

    submit ─▶ Scheduler ─take, as slots are free─▶ a request of vLLM's ─▶ finished groups
                  ▲                                    │
                  └── vLLM never has more than it runs ┘   so who waits, and in which order, is decided here

vLLM's own pauses do the rest:

    drain        nothing new is started; when the last one has ended: pause_generation(keep, clear the cache)
    interrupt    pause_generation(keep, clear the cache): requests stay, keys and values are computed again on resume
    keep         pause_generation(keep, leave the cache): requests go on in place

A version is stamped by vLLM's engine core on the outputs of each step, and changes between pause and resume only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Sequence
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from headway.data.types import FinishReason
from headway.engines.rollout.groups import Groups, numbered, owned_by
from headway.engines.rollout.scheduler import Mode, Scheduler
from headway.engines.rollout.vllm.activity import Activity
from headway.engines.rollout.vllm.request import has_tokens, prompt_of, reason_of, sampling_of, written_of
from headway.engines.rollout.work import GroupRun, TrajectoryRun
from headway.errors import HeadwayError, ModelError, RunError, UpdateFailed, WorkerDied
from headway.interfaces import EngineStats, FinishedGroup, GenerateRequest, OnUpdate, Paused, Priority
from headway.models.probe import PROBE_PREFILL, probe_sequences

T = TypeVar("T")

Deliver = Callable[[Hashable, FinishedGroup | HeadwayError], None]
"""Hands a finished group, or the engine's end, to whoever submitted it."""


WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""vLLM's tags of the memory that it gives up when it sleeps."""


class Weights(StrEnum):
    """The state of the weights that vLLM's workers hold."""

    SERVED = "served"
    """Exactly one whole version, with whose number tokens are stamped."""
    TORN = "torn"
    """Parts of two versions: a load failed half-way."""
    GONE = "gone"
    """No weights: their memory was given up in sleep."""


class VllmCore:
    """One engine of vLLM's. Driven from its loop alone."""

    def __init__(
        self,
        llm: Any,
        deliver: Deliver,
        *,
        name: str,
        seed: int,
        slots: int,
        max_context: int,
        decode: Callable[[Sequence[int]], str],
        clock: Callable[[], float],
        activity: Activity,
        temperature: float,
        can_sleep: bool,
    ) -> None:
        """``llm``: an ``AsyncLLM`` of the running loop, whose steps are counted in ``activity``."""
        self._llm = llm
        self._deliver = deliver
        self._name = name
        self._seed = seed
        self._slots = slots
        self._max_context = max_context
        self._vocabulary = int(llm.model_config.get_vocab_size())
        self._decode = decode
        self._clock = clock
        self._activity = activity
        self._temperature = temperature
        self._can_sleep = can_sleep
        self._scheduler = Scheduler()
        self._groups = Groups()
        self._running: dict[str, TrajectoryRun] = {}
        """The trajectories that vLLM has, by request id."""
        self._following: dict[str, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()
        """Held while vLLM is told to pause, to load or to go on."""
        self._halted = False
        """vLLM is paused."""
        self._cleared = False
        """Paused, and all keys and values are gone."""
        self._sleeping: list[str] = []
        """The parts of its memory that sleep, by vLLM's tags: it wakes as a whole, or the weights first, when new ones
        come."""
        self._moved = asyncio.Event()
        """Set, and replaced, when the scheduler's mode may have changed."""
        self._weights = Weights.SERVED
        self._over: HeadwayError | None = None
        self._ended_for_good = asyncio.Event()
        """Set once ``_over`` is: the engine ended with an error."""
        self.version = 0

    @property
    def _asleep(self) -> bool:
        """The engine is asleep: it computes nothing before `wake`."""
        return bool(self._sleeping)

    # ------------------------------------------------------------------------------------- commands

    async def begin(self) -> None:
        """The first weights are version 0. Raises `ModelError` for a model that vLLM loads and cannot compute with."""
        if (handler := getattr(self._llm, "output_handler", None)) is not None:
            handler.add_done_callback(lambda _: self._lost())  # also when nobody generates
        await self._tell("start", self._llm.get_supported_tasks())  # kept by vLLM: requests then register at once
        await self._tell("start", self._llm.update_weight_version("0"))
        first = self._llm.collective_rpc("headway_score", args=([[0, 0]], [0], 1.0))
        await self._tell("compute with the model", first, ModelError)

    async def connect(self, path: str, nbytes: int, slots: list[tuple[str, list[int], str, int, int]]) -> None:
        """Let the workers map the buffer at ``path``."""
        from vllm.distributed.weight_transfer.base import (  # type: ignore[import-not-found]
            WeightTransferInitRequest,
        )

        request = WeightTransferInitRequest({"path": path, "nbytes": nbytes, "slots": slots})
        mapped = self._llm.init_weight_transfer_engine(request)
        await self._tell("map the buffer for new weights", mapped, UpdateFailed)

    async def submit(self, requests: Sequence[GenerateRequest], owner: Hashable) -> None:
        """Queue all requests at once, or none: raises `DataError` for one that cannot be served."""
        self._check()
        groups = self._groups.submit(
            requests,
            lambda request, serial: GroupRun.of(
                request,
                owner,
                seed=self._seed,
                serial=serial,
                max_context=self._max_context,
                vocabulary=self._vocabulary,
            ),
        )
        self._scheduler.submit(groups)
        self._fill()

    async def pause(self, policy: OnUpdate) -> Paused:
        """Returns when nothing decodes any more under ``policy``."""
        self._check()
        self._scheduler.pause(policy)
        self._settle()
        while self._scheduler.mode is Mode.DRAINING and self._over is None:
            await self._moved.wait()
        self._check()
        async with self._alone():
            if self._scheduler.mode is not Mode.PAUSED:  # resumed meanwhile
                return Paused()
            cut = policy is OnUpdate.INTERRUPT and not self._cleared
            # A drain that another pause ended leaves what that one keeps as it is.
            await self._halt(clear=cut or (policy is OnUpdate.DRAIN and not self._running))
        return Paused(sum(run.started is not None for run in self._running.values()) if cut else 0)

    async def resume(self) -> None:
        """Go on. Raises `RunError` while asleep, and while there is no whole version to sample from."""
        self._check()
        async with self._alone():
            if self._asleep:
                raise RunError(f"rollout engine {self._name} was told to resume while asleep; call wake() first")
            self._check_weights("resume")
            await self._go_on()
            self._scheduler.resume()
        self._settle()
        self._fill()

    async def activate(self, version: int, load: Callable[[Callable[[], None]], None]) -> float:
        """Load the staged ``version`` and stamp it on what is sampled from now on; seconds taken.

        ``load`` checks that it is there and calls its argument, blocking, on a thread of its own. Trajectories that are
        decoding go on with the keys and values that they have. Raises `UpdateFailed`; the weights are then torn, if
        vLLM was told to load them.
        """
        self._check()
        async with self._alone():
            start = self._clock()
            await self._halt(clear=False)
            loop = asyncio.get_running_loop()
            try:
                await asyncio.to_thread(
                    load, lambda: asyncio.run_coroutine_threadsafe(self._load(version), loop).result()
                )
            finally:
                goes_on = self._scheduler.mode is not Mode.PAUSED and not self._asleep
                if goes_on and self._weights is Weights.SERVED and self._over is None:
                    await self._go_on()
            return self._clock() - start

    async def abort(self, numbers: Sequence[int]) -> None:
        """End these training groups as they are."""
        self._check()
        await self._end(numbered(numbers))

    async def abort_older_than(self, version: int) -> list[int]:
        """`abort` the unfinished training groups with a token of an older version; in order of submission."""
        self._check()
        old = self._groups.older_than(version)
        await self.abort(old)
        return old

    async def forget(self, owner: Hashable) -> None:
        """Stop and drop everything that ``owner`` submitted."""
        if self._over is None:
            await self._end(owned_by(owner))

    async def in_flight(self) -> list[int]:
        """Numbers of unfinished training groups, in order of submission."""
        self._check()
        return self._groups.in_flight()

    async def sleep(self, keep_weights: bool) -> None:
        """Free the device's memory. Raises `RunError` unless paused, and where the platform cannot."""
        self._check()
        if not self._can_sleep:
            raise RunError(
                f"rollout engine {self._name} cannot sleep: vLLM frees nothing on a CPU, elsewhere only when it was "
                "started so; set placement.kind=split"
            )
        async with self._alone():
            if self._scheduler.mode is not Mode.PAUSED:
                raise RunError(f"rollout engine {self._name} was told to sleep while decoding; pause it first")
            if self._asleep:
                self._weights = self._weights if keep_weights else Weights.GONE
                return
            await self._tell("sleep", self._llm.sleep(level=1 if keep_weights else 2, mode="keep"))
            self._activity.interrupted()
            self._sleeping = [WEIGHTS, KV_CACHE]
            if not keep_weights:
                self._weights = Weights.GONE

    async def wake(self) -> None:
        """Take the device's memory back; still paused."""
        self._check()
        async with self._alone():
            if self._asleep:
                await self._tell("wake", self._llm.wake_up(list(self._sleeping)))
                # Waking lets it go on.
                await self._tell("pause", self._llm.pause_generation(mode="keep", clear_cache=True))
                self._sleeping, self._cleared = [], True

    async def probe(self) -> NDArray[np.float32] | None:
        """Log-probs [8] of `headway.models.probe`'s sequences; None where a context is too short for them."""
        self._check()
        sequences = probe_sequences(self._vocabulary)
        if sequences.shape[1] > self._max_context:
            return None
        positions = range(PROBE_PREFILL, sequences.shape[1])
        contexts = [ids[:position].tolist() for ids in sequences for position in positions]
        tokens = [int(ids[position]) for ids in sequences for position in positions]
        async with self._alone():
            self._check_weights("probe")
            if self._asleep:
                raise RunError(f"rollout engine {self._name} was told to probe while asleep; call wake() first")
            was_halted = self._halted
            await self._halt(clear=False)
            try:
                scoring = self._llm.collective_rpc("headway_score", args=(contexts, tokens, self._temperature or 1.0))
                scores = await self._tell("compute the probe's log-probs", scoring)
            finally:
                if not was_halted and self._over is None:
                    await self._go_on()
        return np.array(next((s for s in scores if s), []), np.float32)

    async def stats(self) -> EngineStats:
        """Activity since the last call."""
        self._check()
        running = 0 if self._halted else len(self._running)
        return self._activity.take(running, self._scheduler.waiting + len(self._running) - running, self.version)

    async def close(self, error: HeadwayError) -> None:
        """End everything; whoever still waits gets ``error``."""
        self._fail(error)
        tasks = list(self._following.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------- running

    def _fill(self) -> None:
        """Submit waiting trajectories to vLLM while it has free slots."""
        if self._over is not None:
            return
        for run in self._scheduler.take(self._slots - len(self._running)):
            request = f"{self._name}-{run.serial}"
            self._running[request] = run
            self._following[request] = asyncio.create_task(self._follow(request, run))
        self._show()

    async def _follow(self, request: str, run: TrajectoryRun) -> None:
        last = None
        try:
            outputs = self._llm.generate(
                prompt_of(run, self.version),
                sampling_of(run),
                request,
                priority=int(run.group.request.priority is Priority.TRAINING),
            )
            async for output in outputs:
                last = output
                if run.started is None and has_tokens(output):
                    run.started = self._clock()
                    if run.group.oldest_version is None:
                        run.group.oldest_version = self.version
            reason = None if last is None else reason_of(last)
            if last is None or reason is None:
                ended = "without an output" if last is None else f"with {last.outputs[0].finish_reason!r}"
                raise RunError(f"rollout engine {self._name}: vLLM ended {run.group.request.prompt.row} {ended}")
            run.written = written_of(last, self._name)
        except HeadwayError as error:
            self._fail(error)
        except Exception as cause:
            self._fail(self._attributed("generate", cause, RunError))
        else:
            self._ended(request, run, reason)

    def _ended(self, request: str, run: TrajectoryRun, reason: FinishReason) -> None:
        del self._running[request], self._following[request]
        if self._over is not None:  # whoever waited was told so
            return
        self._activity.ended(0 if run.fresh else len(run.context))
        self._finish(run, reason)
        self._fill()
        self._settle()

    def _finish(self, run: TrajectoryRun, reason: FinishReason) -> None:
        group = run.group
        done = group.finish(run, reason, replica=self._name, text=self._decode, finished=self._clock())
        if done is not None:
            self._groups.remove(group)
            self._deliver(group.owner, done)

    async def _end(self, belongs: Callable[[GroupRun], bool]) -> None:
        """Abort every trajectory of the groups that ``belongs`` names, wherever it is; return when they have ended."""
        for run in self._scheduler.remove(belongs):
            self._finish(run, FinishReason.ABORTED)
        await asyncio.sleep(0)  # requests that were just made have to be registered before they can be aborted
        requests = [request for request, run in self._running.items() if belongs(run.group)]
        tasks = [self._following[request] for request in requests]
        if requests:
            await self._tell("abort", self._llm.abort(requests))
            await asyncio.wait(tasks)
        self._settle()

    def _settle(self) -> None:
        """End a drain where nothing is left to run, and tell those who wait for that."""
        if self._scheduler.mode is Mode.DRAINING and not self._running and not self._scheduler.queued:
            self._scheduler.drained()
        self._moved.set()
        self._moved = asyncio.Event()

    def _show(self) -> None:
        self._activity.running(len(self._running), halted=self._halted)

    # ------------------------------------------------------------------------------------- vLLM

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Context in which no other command runs. Raises the engine's error if it ended, also while this one waited."""
        async with self._turn:
            self._check()
            yield

    async def _halt(self, *, clear: bool) -> None:
        """Pause vLLM and collect the outputs under way. ``clear`` also empties the cache: all is prefilled again."""
        if self._halted and (self._cleared or not clear):
            return
        await self._tell("pause", self._llm.pause_generation(mode="keep", clear_cache=clear))
        self._halted, self._cleared = True, clear
        if clear:
            self._activity.interrupted()
        self._show()

    async def _go_on(self) -> None:
        if self._halted:
            await self._tell("go on", self._llm.resume_generation())
            self._halted = self._cleared = False
            self._show()

    async def _load(self, version: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        async def load() -> None:
            if WEIGHTS in self._sleeping:
                await self._llm.wake_up([WEIGHTS])
                self._sleeping.remove(WEIGHTS)  # once: vLLM takes memory for whatever it is told to wake
            await self._llm.start_weight_update()
            await self._llm.update_weights(WeightTransferUpdateRequest({"version": version}))
            await self._llm.finish_weight_update(str(version))

        self._weights = Weights.TORN  # until all of it is loaded
        await self._tell(f"load version {version}", load(), UpdateFailed)
        self._weights = Weights.SERVED
        self.version = version

    async def _tell(self, what: str, order: Coroutine[Any, Any, T], error: type[HeadwayError] = RunError) -> T:
        """vLLM's answer to an ``order`` to do ``what``, or what this engine ended with: a dead vLLM never answers.

        Raises ``error`` for what vLLM raises; its end ends this engine.
        """
        answer = asyncio.create_task(order)
        ended = asyncio.create_task(self._ended_for_good.wait())
        try:
            await asyncio.wait((answer, ended), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                self._check()
            return await answer
        except HeadwayError:
            raise
        except Exception as cause:
            attributed = self._attributed(what, cause, error)
            if isinstance(attributed, WorkerDied):
                self._fail(attributed)
            raise attributed from cause
        finally:
            answer.cancel()
            ended.cancel()

    def _attributed(self, what: str, cause: Exception, error: type[HeadwayError]) -> HeadwayError:
        detail = f"{type(cause).__name__}: {cause}"
        if self._llm.errored:
            dead = WorkerDied(f"vLLM's processes of rollout engine {self._name} ended when told to {what}: {detail}")
            dead.__cause__ = cause
            return dead
        failed = error(f"rollout engine {self._name}: vLLM was told to {what}: {detail}")
        failed.__cause__ = cause
        return failed

    def _fail(self, error: HeadwayError) -> None:
        """End the engine with ``error``, which every waiting and every later caller gets."""
        if self._over is None:
            self._over = error
            self._ended_for_good.set()
            for owner in self._groups.owners():
                self._deliver(owner, error)
            self._groups.clear()
            self._activity.running(0)
            self._settle()

    def _lost(self) -> None:
        """The error for outputs of vLLM's that have ended: by its death, unless this engine ended before."""
        self._fail(WorkerDied(f"vLLM's processes of rollout engine {self._name} have ended; its own output says why"))

    def _check(self) -> None:
        if self._over is None and self._llm.errored:
            self._lost()
        if self._over is not None:
            raise self._over

    def _check_weights(self, doing: str) -> None:
        match self._weights:
            case Weights.TORN:
                problem = "its weights are torn: loading a version failed half-way; activate a whole version first"
            case Weights.GONE:
                problem = "its weights were given up when it was put to sleep; stage and activate a version first"
            case _:
                return
        raise RunError(f"rollout engine {self._name} cannot {doing}: {problem}")
