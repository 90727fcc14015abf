"""The vLLM rollout engine: `RolloutEngine` over ``AsyncLLM``, on its own thread and event loop.

any event loop                            vLLM's loop                        receiving thread
──────────────                            ───────────                        ────────────────
submit, pause, activate … ────commands──▶ VllmCore ══▶ vLLM's processes      fill ◀── a transport
inboxes, answers ◀────────────────────────┘                ▲                   │
                                                           └── shared memory ◀─┘
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headway.config.doctor import check_vllm_installed
from headway.config.sizing.timeouts import close_s, model_nbytes
from headway.data.interfaces.rollout import Capabilities, OnUpdate
from headway.data.types import TrajectoryId
from headway.engines.rollout.engine_activity import VllmActivity
from headway.engines.rollout.engine_base import EngineBase, Work
from headway.engines.rollout.vllm.launch import (
    VllmSettings,
    check_manifest,
    is_cpu_build,
    is_roomy,
    start,
)
from headway.engines.rollout.vllm.vllm_core import VllmCore
from headway.engines.weights.incoming_version import BackBuffer
from headway.engines.weights.protocols import IncomingWeights
from headway.engines.weights.receiver_state import ReceiverState
from headway.engines.weights.served_weights import WeightUpdates, outcome
from headway.engines.weights.weight_layout import Manifest
from headway.errors import HeadwayError, RunError, StallError, WorkerDied


class VllmEngine(EngineBase):
    """`RolloutEngine` over vLLM. Call `start` before anything else.

    Args:
        model_path: a Hugging Face folder; its weights are version 0.
        name: of the replica, in results and messages.
        seed: of the run; with a call's episode and key it determines the seed of its request.
        slots: calls that decode at once: vLLM never has more of them.
        max_context: most tokens of a call's context and answer together.
        dtype: of weights and arithmetic, as torch spells it without the prefix; ``auto``: the folder's.
        receive: puts a version into a sink, blocking; a transport's end. Without it there are no updates.
        manifest: the layout of what it brings.
        temperature: of the run's sampling, for `probe`; each request has its own.
        clock: seconds, the same clock as the events'.
        max_batched_tokens: of one step of vLLM's; None: its own choice.
        kv_cache_gib: memory for keys and values; None: 1 on a CPU, vLLM's own choice elsewhere.
        enforce_eager: on a GPU, decode without CUDA graphs.
        trust_remote_code: of the model folder.
        sleep: the device's memory can be given back (GPUs).
        tensor_parallel: devices that divide each layer.
        options: further arguments of vLLM's ``AsyncEngineArgs``.

    Reproducible: each call's request has a seed of its own, whose generator vLLM keeps through its pauses: what
    is sampled depends on when and with whom only where vLLM's logits do. The seeds are Headway's, what they draw is
    vLLM's: the native engine samples other answers. Where memory for keys and values is short of a whole context for
    each slot it is not, and `capabilities` say so once it has started: what vLLM preempts keeps its generator, but is
    prefilled again, which may change the last bits of its logits.

    What calls have in common is found by vLLM's own prefix cache, which keeps what it has room for.

    New weights arrive in a buffer of shared memory, of the weights' size, while vLLM decodes; its workers, which have
    to run on this machine, load them from there.

    Raises `ConfigError` where vLLM is not installed, and `ModelError` when ``manifest`` is not of this model.
    """

    capabilities = Capabilities(on_update=frozenset(OnUpdate), reproducible=True, sleep=False)

    def __init__(
        self,
        model_path: Path,
        *,
        name: str,
        seed: int,
        slots: int,
        max_context: int,
        dtype: str = "auto",
        receive: Callable[[int, IncomingWeights], None] | None = None,
        manifest: Manifest | None = None,
        temperature: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        max_batched_tokens: int | None = None,
        kv_cache_gib: float | None = None,
        enforce_eager: bool = False,
        trust_remote_code: bool = False,
        sleep: bool = False,
        tensor_parallel: int = 1,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        check_vllm_installed()
        self._close_s = close_s(model_nbytes(str(model_path)))
        super().__init__(name, slots)
        self._settings = VllmSettings(
            model_path=Path(model_path),
            slots=slots,
            max_context=max_context,
            dtype=dtype,
            max_batched_tokens=max_batched_tokens,
            kv_cache_gib=kv_cache_gib,
            enforce_eager=enforce_eager,
            trust_remote_code=trust_remote_code,
            sleep=sleep,
            tensor_parallel=tensor_parallel,
            options=options or {},
        )
        weights = ReceiverState(f"rollout engine {name}")
        self._core_settings: dict[str, Any] = {
            "name": name,
            "seed": seed,
            "slots": slots,
            "max_context": max_context,
            "clock": clock,
            "temperature": temperature,
            "weights": weights,
        }
        self._clock = clock
        self._manifest: Manifest | None = None
        if receive is not None and manifest is not None:
            check_manifest(manifest, self._settings.model_path)
            self._manifest = manifest
            self._updates = WeightUpdates(BackBuffer(manifest, state=weights), receive, torch.device("cpu"))
        self._core: VllmCore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._answering: set[asyncio.Task[Any]] = set()
        """Tasks of vLLM's loop that somebody waits for."""
        self._started: Future[None] = Future()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=f"headway-vllm-{name}", daemon=True)

    async def start(self) -> None:
        """Start vLLM's processes and load the model: half a minute, or more.

        Raises `ConfigError` for settings that vLLM refuses, and `WorkerDied` when its processes end.
        """
        if self._thread.ident is None:
            self._thread.start()
        await outcome(self._started)

    # ------------------------------------------------------------------------------------- the protocol

    async def release(self, trajectories: Sequence[TrajectoryId]) -> None:
        """Do nothing: vLLM's cache keeps nothing for a particular episode."""
        self._check_open()

    async def close(self) -> None:
        """End vLLM's processes; calls that are still waiting get a `RunError`. Closing twice is harmless."""
        self._closed = True
        if self._updates is not None:
            self._updates.close()
        if self._thread.ident is None:
            return
        with contextlib.suppress(HeadwayError, TimeoutError):  # what is still starting can only be waited for
            await asyncio.wait_for(self.start(), self._close_s)
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended already
                self._loop.call_soon_threadsafe(self._stop.set)
        await asyncio.to_thread(self._thread.join, self._close_s)
        if self._thread.is_alive():
            raise StallError(f"close() waited {self._close_s:.0f} s for vLLM's processes of {self.name} to end")

    # ------------------------------------------------------------------------------------- vLLM's loop

    def _check_open(self) -> None:
        if self._closed:
            raise self._over()

    def _run(self, work: Work) -> Future[Any]:
        self._check_open()
        if self._core is None or self._loop is None:
            raise RunError(f"rollout engine {self.name} has not started; await start() first")
        answering = self._answer(work, self._core)
        try:
            return asyncio.run_coroutine_threadsafe(answering, self._loop)
        except RuntimeError as cause:
            answering.close()
            raise self._over() from cause

    async def _answer(self, work: Work, core: VllmCore) -> Any:
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        try:
            working = work(core)
            return working if working is None else await working
        except asyncio.CancelledError:  # by the end of the loop: nobody else can
            raise self._over() from None
        finally:
            self._answering.discard(task)

    def _serve(self) -> None:
        try:
            asyncio.run(self._live())
        except BaseException as error:  # whatever ended the thread has to reach those who wait for it
            if not self._started.done():
                known = isinstance(error, HeadwayError)
                self._started.set_exception(error if known else WorkerDied(f"vLLM did not start: {error!r}"))

    async def _live(self) -> None:
        activity = VllmActivity(self._clock)
        llm = start(self._settings, activity.stat_logger)
        try:
            sleep = self._settings.sleep and not is_cpu_build()
            roomy = is_roomy(llm, self.slots)
            self.capabilities = replace(VllmEngine.capabilities, sleep=sleep, reproducible=roomy)
            core = VllmCore(
                llm, self._deliver, self._tell_clients, activity=activity, can_sleep=sleep, **self._core_settings
            )
            await core.begin()
            if self._manifest is not None:
                slots = [(s.name, list(s.shape), s.dtype, s.offset, s.nbytes) for s in self._manifest.slots]
                await core.connect(self._manifest.nbytes, slots)
            self._loop, self._stop, self._core = asyncio.get_running_loop(), asyncio.Event(), core
            self._started.set_result(None)
            await self._stop.wait()
            await core.close(self._over())
            if self._answering:  # who was told what the engine ended with is to say so
                await asyncio.wait(self._answering, timeout=self._close_s / 4)
        finally:
            if (handler := getattr(llm, "output_handler", None)) is not None:
                handler.cancel()  # or it takes the end of vLLM's processes for a failure, and says so
            llm.shutdown(timeout=self._close_s / 2)  # killed, they would leave shared memory behind

    def _over(self) -> RunError:
        return RunError(f"rollout engine {self.name} is closed")
