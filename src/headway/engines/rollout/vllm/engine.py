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
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headway.config.doctor import check_vllm_installed
from headway.config.sizing.timeouts import close_s, model_nbytes
from headway.data.interfaces.rollout import Capabilities, OnUpdate
from headway.data.types import TrajectoryId
from headway.devices import CPU, kind_here
from headway.engines.rollout.engine_activity import VllmActivity
from headway.engines.rollout.engine_base import ClientInbox, EngineBase, Work
from headway.engines.rollout.vllm.vllm_core import VllmCore
from headway.engines.weights.incoming_version import BackBuffer
from headway.engines.weights.protocols import IncomingWeights
from headway.engines.weights.receiver_state import ReceiverState
from headway.engines.weights.served_weights import WeightUpdates, outcome
from headway.engines.weights.weight_layout import Manifest, check_layout
from headway.errors import ConfigError, HeadwayError, RunError, WorkerDied
from headway.models.model_folder import tensors_in_files

PACKAGE = __name__.rpartition(".")[0]
KV_CACHE_GIB = 1.0
"""GiB of the KV cache on a CPU, where vLLM would take nearly all memory."""


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """Settings with which vLLM is started."""

    model_path: Path
    slots: int
    max_context: int
    dtype: str = "auto"
    """The dtype of weights and arithmetic as torch spells it, without the prefix; ``auto``: the folder's."""
    max_batched_tokens: int | None = None
    """Most tokens of one step, prompts and answers together. None: vLLM's default."""
    kv_cache_gib: float | None = None
    """GiB of memory for keys and values. None: `KV_CACHE_GIB` on a CPU, a share of the device's memory elsewhere."""
    enforce_eager: bool = False
    """True: run without CUDA graphs, as always on a CPU."""
    trust_remote_code: bool = False
    """True: run code from the model folder."""
    sleep: bool = False
    """True if vLLM can free the device's memory on demand; not on a CPU."""
    tensor_parallel: int = 1
    """Number of devices that divide each layer, the first that this process sees; each has a vLLM process."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's ``AsyncEngineArgs``, by name."""


def prepare_environment(on_cpu: bool) -> None:
    """Set the environment variables that vLLM reads on import, and its processes at their start.

    Variables that the user has set stay. On a CPU, compilation is off, or the first request for log-probs would compile
    for half a minute; and so is binding to cores, which the trainer shares.
    """
    variables = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    if on_cpu:
        variables |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    for variable, value in variables.items():
        os.environ.setdefault(variable, value)


def start_vllm(settings: VllmSettings, stat_logger: Callable[..., Any]) -> Any:
    """Start vLLM's processes and load the model, blocking: an ``AsyncLLM`` of the running loop.

    Raises `ConfigError` when vLLM is missing or refuses the settings, and `WorkerDied` when its processes end.
    """
    check_vllm_installed()
    on_cpu = kind_here() is CPU
    prepare_environment(on_cpu)
    from vllm.config import WeightTransferConfig  # type: ignore[import-not-found]
    from vllm.engine.arg_utils import AsyncEngineArgs  # type: ignore[import-not-found]
    from vllm.v1.engine.async_llm import AsyncLLM  # type: ignore[import-not-found]

    from headway.engines.rollout.vllm.extension import BACKEND

    gib = settings.kv_cache_gib
    if gib is None and on_cpu and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        gib = KV_CACHE_GIB
    arguments: dict[str, Any] = {
        "model": str(settings.model_path),
        "tokenizer": str(settings.model_path),
        "trust_remote_code": settings.trust_remote_code,
        "dtype": settings.dtype,
        "max_model_len": settings.max_context,
        "max_num_seqs": settings.slots + 1,  # one more for the probe, next to paused requests
        # Log-probs of the distribution that was sampled from: vLLM's default is before temperature and filters.
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # the folder's generation config must not change the distribution
        "enable_prefix_caching": True,
        "enforce_eager": on_cpu or settings.enforce_eager,
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": f"{PACKAGE}.extension.WorkerExtension",
        "enable_sleep_mode": settings.sleep,
        "enable_logging_iteration_details": True,  # the only report of a step's work
    }
    arguments |= _batching(settings, on_cpu)
    if settings.tensor_parallel > 1:
        # With processes of its own: within Ray's placement groups vLLM would start further actors.
        arguments |= {"tensor_parallel_size": settings.tensor_parallel, "distributed_executor_backend": "mp"}
    if gib is not None:
        arguments["kv_cache_memory_bytes"] = int(gib * 2**30)
    try:
        engine_arguments = AsyncEngineArgs(**{**arguments, **settings.options})
    except (TypeError, ValueError) as cause:
        raise ConfigError(f"vLLM does not take its settings: {cause}") from cause
    try:
        return AsyncLLM.from_engine_args(engine_arguments, stat_loggers=[stat_logger])
    except ValueError as cause:  # pydantic's errors are among these
        raise ConfigError(f"vLLM does not take its settings: {cause}") from cause
    except RuntimeError as cause:
        raise WorkerDied(f"vLLM did not start: {cause}; its own output says why") from cause


def _batching(settings: VllmSettings, on_cpu: bool) -> dict[str, Any]:
    """The settings that bound one step of vLLM's.

    On a CPU a prompt is prefilled in one step, together with all decoding calls: vLLM rewinds a request's generator for
    each step that prefills only a part of its prompt, and a CPU's generator cannot be rewound.
    """
    given, slots = settings.max_batched_tokens, settings.slots
    if on_cpu:
        return {
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(given or 0, settings.max_context + slots + 1),
        }
    if given is None:
        return {}
    return {"max_num_batched_tokens": max(slots + 1, min(given, slots * settings.max_context))}


def is_roomy(llm: Any, slots: int) -> bool:
    """Tell whether vLLM's cache has a whole context per slot, so that it never preempts. False if that is unknown."""
    contexts = getattr(llm.vllm_config.cache_config, "kv_cache_max_concurrency", None)
    return bool(contexts and contexts > slots)  # not >=: one block is never given to a request


def check_manifest(manifest: Manifest, model_path: Path) -> None:
    """Raise `ModelError` unless ``manifest`` has each weight of the folder once, in its shape.

    Folders without safetensors files are not looked at.
    """
    config = json.loads((model_path / "config.json").read_text())
    # A tied output layer may be in the files, and need not be in the manifest.
    optional = {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
    optional -= {slot.name for slot in manifest.slots}
    shapes = {one.name: tuple(one.shape) for one in tensors_in_files(model_path) if one.name not in optional}
    if shapes:
        check_layout(manifest, shapes, f"{model_path}, which vLLM serves,")


class VllmEngine(EngineBase):
    """`RolloutEngine` over vLLM. Call `start` before anything else.

    Args:
        model_path: a Hugging Face folder; its weights are version 0.
        name: of the replica, in results and messages.
        seed: of the run; with a call's episode and key it determines the seed of its request.
        slots: calls that decode at once: vLLM never has more of them.
        max_context: most tokens of a call's context and answer together.
        receive: puts a version into a sink, blocking; a transport's end. Without it there are no updates.
        manifest: the layout of what it brings.
        temperature: of the run's sampling, for `probe`; each request has its own.
        clock: seconds, the same clock as the events'.
        settings: further ones of `VllmSettings`.

    Reproducible: each request has its own seed, and vLLM keeps its generator through pauses. So samples depend on time
    and on other requests only if vLLM's logits do. vLLM's draws differ from the native engine's, even for equal seeds.
    It is not reproducible if memory for keys and values does not fit a whole context per slot; `capabilities` say so
    after the start. A request that vLLM preempts keeps its generator but is prefilled again, which may change the last
    bits of its logits.

    vLLM's own prefix cache shares common prefixes of calls, as far as it has room.

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
        receive: Callable[[int, IncomingWeights], None] | None = None,
        manifest: Manifest | None = None,
        temperature: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        **settings: Any,
    ) -> None:
        check_vllm_installed()
        super().__init__(name, slots, close_s(model_nbytes(str(model_path))))
        self._settings = VllmSettings(Path(model_path), slots, max_context, **settings)
        state = ReceiverState(f"rollout engine {name}")
        self._make_core = partial(
            VllmCore, name=name, seed=seed, slots=slots, max_context=max_context, temperature=temperature, weights=state
        )
        self._clock = clock
        self._manifest: Manifest | None = None
        if receive is not None and manifest is not None:
            check_manifest(manifest, self._settings.model_path)
            self._manifest = manifest
            self._updates = WeightUpdates(BackBuffer(manifest, state=state), receive, torch.device("cpu"))
        self._core: VllmCore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._answering: set[asyncio.Task[Any]] = set()
        """Tasks on vLLM's loop that callers wait for."""
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._serve, name=f"headway-vllm-{name}", daemon=True)

    async def start(self) -> None:
        """Start vLLM's processes and load the model: half a minute, or more.

        Raises `ConfigError` for settings that vLLM refuses, and `WorkerDied` when its processes end.
        """
        if self._thread.ident is None:  # a thread can be started once
            self._thread.start()
        await outcome(self._started)

    # ------------------------------------------------------------------------------------- the protocol

    async def release(self, trajectories: Sequence[TrajectoryId]) -> None:
        """Do nothing: vLLM's cache keeps nothing for a particular episode."""
        self._check_open()

    async def close(self) -> None:
        """End vLLM's processes; calls that are still waiting get a `RunError`. Closing twice is harmless."""
        self._closing = True
        if self._updates is not None:
            self._updates.close()
        if self._thread.ident is None:
            return
        with contextlib.suppress(HeadwayError, TimeoutError):  # what is still starting can only be waited for
            await asyncio.wait_for(self.start(), self._close_s)
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended already
                self._loop.call_soon_threadsafe(self._stop.set)
        await self._join(self._thread)

    # ------------------------------------------------------------------------------------- vLLM's loop

    def _run(self, work: Work) -> Future[Any]:
        self._check_open()
        if self._core is None or self._loop is None:
            raise RunError(f"rollout engine {self.name} has not started; await start() first")
        answering = self._answer(work, self._core)
        try:
            return asyncio.run_coroutine_threadsafe(answering, self._loop)
        except RuntimeError as cause:
            answering.close()  # or Python warns of a coroutine that was never awaited
            raise self._closed_error() from cause

    async def _answer(self, work: Work, core: VllmCore) -> Any:
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        try:
            return await work(core)
        except asyncio.CancelledError:  # by the end of the loop: nobody else can
            raise self._closed_error() from None
        finally:
            self._answering.discard(task)

    def _serve(self) -> None:
        try:
            asyncio.run(self._live())
        except BaseException as error:  # waiting callers need the error, whatever it is
            if not self._started.done():
                known = isinstance(error, HeadwayError)
                self._started.set_exception(error if known else WorkerDied(f"vLLM did not start: {error!r}"))

    async def _live(self) -> None:
        activity = VllmActivity(self._clock)
        llm = start_vllm(self._settings, activity.stat_logger)
        try:
            sleep = self._settings.sleep and kind_here() is not CPU
            roomy = is_roomy(llm, self.slots)
            self.capabilities = replace(VllmEngine.capabilities, sleep=sleep, reproducible=roomy)
            core = self._make_core(llm, ClientInbox.put, self._tell_clients, activity=activity, can_sleep=sleep)
            await core.state.begin()
            if self._manifest is not None:
                slots = [(s.name, list(s.shape), s.dtype, s.offset, s.nbytes) for s in self._manifest.slots]
                await core.state.connect(self._manifest.nbytes, slots)
            self._loop, self._stop, self._core = asyncio.get_running_loop(), asyncio.Event(), core
            self._started.set_result(None)  # last: callers rely on all that was set above
            await self._stop.wait()
            await core.close(self._closed_error())
            if self._answering:  # let callers finish with the engine's final error
                await asyncio.wait(self._answering, timeout=self._close_s / 4)
        finally:
            if (handler := getattr(llm, "output_handler", None)) is not None:
                handler.cancel()  # or it reports the end of vLLM's processes as a failure
            llm.shutdown(timeout=self._close_s / 2)  # killed, they would leave shared memory behind
