"""Calls that vLLM answers, and the effect of updates on them. Everything here runs on vLLM's event loop.

    submit ─▶ Scheduler ─take, as slots are free─▶ a request of vLLM's ─▶ finished calls, in batches
                  ▲                                    │
                  └── vLLM never has more than it runs ┘   so who waits, and in which order, is decided here

vLLM's own pauses do the rest:

    drain        nothing new is started; when the last one has ended: pause_generation(keep, clear the cache)
    interrupt    pause_generation(keep, clear the cache): requests stay, keys and values are computed again on resume
    keep         pause_generation(keep, leave the cache): requests resume in place

A version is stamped by vLLM's engine core on the outputs of each step, and changes between pause and resume only.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.data.interfaces.rollout import Completion, EngineStats, GenerateRequest, OnUpdate, Paused
from headway.data.types import FinishReason, SampledTokens
from headway.engines.rollout.engine_activity import VllmActivity
from headway.engines.rollout.scheduler import Mode, RequestState, Scheduler, not_finite
from headway.engines.rollout.vllm.vllm_state import VllmState
from headway.engines.weights.incoming_version import BackBuffer
from headway.engines.weights.receiver_state import ReceiverState
from headway.errors import HeadwayError, RunError
from headway.models.logprobs import PROBE_PREFILL, probe_sequences

_FIRST_AND_LAST = 2**31
"""Interval in tokens between outputs, longer than any answer: vLLM sends the first token, and the rest at the end."""
_SEED_BITS = 63
"""Bits of a seed: vLLM's seeds are signed."""


def prompt_of(run: RequestState, version: int) -> Any:
    """Return the context as token ids. Only calls under the same version of the weights share keys and values."""
    from vllm.inputs import tokens_input  # type: ignore[import-not-found]

    return tokens_input(run.request.input_ids.tolist(), cache_salt=f"headway-{version}")


def sampling_of(run: RequestState) -> Any:
    """vLLM's sampling parameters: one seed per call, log-probs of the sampled tokens, no text.

    Before ``min_tokens`` vLLM withholds the tokenizer's end-of-sequence, too, whatever the request's stop tokens are;
    and it takes temperatures between 0 and 0.01 for 0.01.
    """
    from vllm import SamplingParams  # type: ignore[import-not-found]
    from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

    sampling = run.request.sampling
    bias: defaultdict[int, float] = defaultdict(float)
    for token, added in sampling.logit_bias:
        bias[token] += added
    return SamplingParams(
        max_tokens=run.limit,
        min_tokens=min(sampling.min_tokens, run.limit),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(bias) or None,
        stop=list(sampling.stop) or None,
        include_stop_str_in_output=True,
        stop_token_ids=list(sampling.stop_token_ids) or None,
        ignore_eos=True,  # ignores the model folder's: the request has the stop tokens
        # Without one all requests draw from one generator, in order of arrival.
        seed=run.key & ((1 << _SEED_BITS) - 1),
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,  # a stop string may be one
        output_kind=RequestOutputKind.CUMULATIVE,
        stream_interval=_FIRST_AND_LAST,
    )


def written_of(output: Any, replica: str) -> SampledTokens:
    """The tokens of a last output, their log-probs, and the version that vLLM says sampled each of them.

    Raises `NonFinite` for weights that give no distribution, and `RunError` when the three do not agree in length.
    """
    completion = output.outputs[0]
    ids = np.array(completion.token_ids, np.int32)
    logprobs = np.array(completion.logprobs.logprobs if completion.logprobs is not None else [], np.float32)
    versions = np.full(len(ids), -1, np.int32)
    for span in completion.weight_versions or ():
        versions[span.start : span.end] = int(span.version)
    if len(logprobs) != len(ids) or (versions < 0).any():
        raise RunError(
            f"rollout engine {replica}: vLLM gave {len(ids)} tokens, {len(logprobs)} log-probs and the versions "
            f"{completion.weight_versions}; this release of vLLM is not one that Headway knows"
        )
    if not all(map(math.isfinite, logprobs.tolist())):
        raise not_finite(replica, int(versions[-1]))
    return SampledTokens(ids, logprobs, versions)


_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}
"""vLLM's reasons for the end of an answer; it has others, which are failures."""
Deliver = Callable[[Any, Sequence[Completion]], None]
"""Takes the calls of a client that one step has finished."""


@dataclass(eq=False)
class VllmCore:
    """One engine of vLLM's. Driven from its loop alone. Fields without a docstring: see `VllmEngine`."""

    llm: Any
    """An ``AsyncLLM`` of the running loop, whose steps are counted in `activity`."""
    deliver: Deliver
    """Called with each batch of finished calls."""
    on_end: Callable[[HeadwayError], None]
    """Function that is called with the engine's final error, to pass on to all clients."""
    name: str
    seed: InitVar[int]
    slots: int
    max_context: int
    activity: VllmActivity
    temperature: float
    can_sleep: bool
    weights: InitVar[ReceiverState]

    def __post_init__(self, seed: int, weights: ReceiverState) -> None:
        cleared = self.activity.interrupted
        self.state = VllmState(self.llm, self.name, weights, on_end=self._end, on_halted=self._show, on_cleared=cleared)
        vocabulary = int(self.llm.model_config.get_vocab_size())
        self._scheduler = Scheduler(seed=seed, max_context=self.max_context, vocabulary=vocabulary)
        self._running: dict[str, RequestState] = {}
        """The calls that vLLM has, by request id."""
        self._following: dict[str, asyncio.Task[None]] = {}
        self._done: dict[Any, list[Completion]] = {}
        """Client -> calls finished in this turn of the loop: those of one step of vLLM."""
        self._turn = asyncio.Lock()
        """Held while vLLM is told to pause, to load or to resume."""
        self._moved = asyncio.Event()
        """Set, and replaced, when the scheduler's mode may have changed."""

    # ------------------------------------------------------------------------------------- commands

    async def submit(self, client: Hashable, calls: Sequence[GenerateRequest]) -> None:
        """Queue all calls at once, or none: raises `DataError` for one that cannot be served."""
        self.state.check()
        self._scheduler.submit(client, calls)
        self._fill()

    async def pause(self, policy: OnUpdate) -> Paused:
        """Returns when nothing decodes any more under ``policy``."""
        self.state.check()
        self._scheduler.pause(policy)
        self._settle()
        while self._scheduler.mode is Mode.DRAINING and self.state.over is None:
            await self._moved.wait()
        self.state.check()  # also if the engine ended while this waited
        async with self._alone():
            if self._scheduler.mode is not Mode.PAUSED:  # resumed meanwhile
                return Paused()
            cut = policy is OnUpdate.INTERRUPT and not self.state.cleared
            # If another pause ended this drain, its policy decides which keys and values are kept.
            await self.state.halt(clear=cut or (policy is OnUpdate.DRAIN and not self._running))
        return Paused(sum(run.started is not None for run in self._running.values()) if cut else 0)

    async def resume(self) -> None:
        """Resume decoding. Raises `RunError` while asleep, and while there is no whole version to sample from."""
        async with self._alone():
            self.state.check_computes("resume")
            await self.state.go_on()
            self._scheduler.resume()
        self._settle()
        self._fill()

    async def activate(self, version: int, load: Callable[[Callable[[BackBuffer], None]], None]) -> float:
        """Load the staged ``version`` and stamp it on what is sampled from now on; seconds taken.

        ``load`` checks that it is there and calls its argument, blocking, on a thread of its own. Calls that are
        decoding keep the keys and values that they have. Raises `UpdateFailed`; the weights are then torn, if
        vLLM was told to load them.
        """
        async with self._alone():
            start = self.activity.clock()
            await self.state.halt(clear=False)
            loop = asyncio.get_running_loop()

            def into_workers(buffer: BackBuffer) -> None:
                asyncio.run_coroutine_threadsafe(self.state.load(version, buffer.path), loop).result()

            try:
                # On another thread: `load` waits for what this loop does for it.
                await asyncio.to_thread(load, into_workers)
            finally:
                goes_on = self._scheduler.mode is not Mode.PAUSED and not self.state.asleep
                if goes_on and self.state.weights.problem is None and self.state.over is None:
                    await self.state.go_on()
            return self.activity.clock() - start

    async def abort(self, client: Hashable, numbers: Sequence[int]) -> None:
        """End these calls of ``client`` with the tokens they have."""
        self.state.check()
        await self._abort(self._scheduler.find(client, numbers))

    async def abort_older_than(self, version: int) -> None:
        """End the unfinished training calls with a token of an older version."""
        self.state.check()
        await self._abort(self._scheduler.older_than(version))

    async def forget(self, client: Hashable) -> None:
        """Stop and drop everything that ``client`` submitted."""
        if self.state.over is None:
            runs = self._scheduler.of(client)  # before they are forgotten: then they are not found
            self._scheduler.forget(client)
            self._done.pop(client, None)
            await self._abort(runs)

    async def sleep(self, *, keep_weights: bool) -> None:
        """Free the device's memory. Raises `RunError` unless paused, and where the platform cannot."""
        self.state.check()
        if not self.can_sleep:
            raise RunError(
                f"rollout engine {self.name} cannot sleep: vLLM frees nothing on a CPU, elsewhere only when it was "
                "started so; set cluster.placement=split"
            )
        async with self._alone():
            if self._scheduler.mode is not Mode.PAUSED:
                raise RunError(f"rollout engine {self.name} was told to sleep while decoding; pause it first")
            await self.state.sleep(keep_weights=keep_weights)

    async def wake(self) -> None:
        """Take the device's memory back; still paused."""
        async with self._alone():
            await self.state.wake()

    async def probe(self) -> NDArray[np.float32] | None:
        """Log-probs [8] of `headway.models.logprobs`'s sequences; None where a context is too short for them."""
        self.state.check()
        sequences = probe_sequences(self._scheduler.vocabulary)
        if sequences.shape[1] > self.max_context:
            return None
        positions = range(PROBE_PREFILL, sequences.shape[1])
        contexts = [ids[:position].tolist() for ids in sequences for position in positions]
        tokens = [int(ids[position]) for ids in sequences for position in positions]
        async with self._alone():
            self.state.check_computes("probe")
            was_halted = self.state.halted
            await self.state.halt(clear=False)
            try:
                return await self.state.score(contexts, tokens, self.temperature or 1.0)
            finally:
                if not was_halted and self.state.over is None:
                    await self.state.go_on()

    async def stats(self) -> EngineStats:
        """Activity since the last call. vLLM's engine core is not asked: its tokens show whether it computes."""
        self.state.check()
        running = 0 if self.state.halted else len(self._running)
        waiting = self._scheduler.waiting + len(self._running) - running
        return self.activity.take(running, waiting, self.state.version)

    async def close(self, error: HeadwayError) -> None:
        """End everything; waiting callers get ``error``."""
        self.state.end(error)
        tasks = list(self._following.values())  # a copy: tasks that end leave the dictionary
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------- running

    def _fill(self) -> None:
        """Submit waiting calls to vLLM while it has free slots."""
        if self.state.over is not None:
            return
        for run in self._scheduler.take(self.slots - len(self._running)):
            request = f"{self.name}-{run.serial}"
            self._running[request] = run
            self._following[request] = asyncio.create_task(self._follow(request, run))
        self._show()

    async def _follow(self, request: str, run: RequestState) -> None:
        last = None
        try:
            outputs = self.llm.generate(
                prompt_of(run, self.state.version), sampling_of(run), request, priority=int(run.trains)
            )
            async for output in outputs:
                last = output
                if run.started is None and output.outputs[0].token_ids:
                    run.started, run.oldest_version = self.activity.clock(), self.state.version
                    run.cached = output.num_cached_tokens or 0
            ended = "no output" if last is None else last.outputs[0].finish_reason
            reason = _REASONS.get(ended)
            if last is None or reason is None:
                raise RunError(f"rollout engine {self.name}: vLLM ended {run.request.trajectory} with {ended}")
            run.written = written_of(last, self.name)
        except HeadwayError as error:
            self.state.end(error)
        except Exception as cause:
            self.state.end(self.state.attributed("generate", cause, RunError))
        else:
            self._ended(request, run, reason)

    def _ended(self, request: str, run: RequestState, reason: FinishReason) -> None:
        del self._running[request], self._following[request]
        if self.state.over is not None:  # whoever waited was told so
            return
        self.activity.ended(0 if run.started is None else run.length)
        self._finish(run, reason)
        self._fill()
        self._settle()

    def _finish(self, run: RequestState, reason: FinishReason) -> None:
        """Deliver ``run``, with all that is finished in this turn of the loop, unless its client has left."""
        if self._scheduler.find(run.client, [run.request.number]) != [run]:
            return
        if not self._done:
            asyncio.get_running_loop().call_soon(self._deliver)
        self._done.setdefault(run.client, []).append(self._scheduler.finish(run, reason, self.activity.clock()))

    def _deliver(self) -> None:
        done, self._done = self._done, {}  # exchanged first: `_finish` schedules a delivery where it is empty
        for client, batch in done.items():
            self.deliver(client, batch)

    async def _abort(self, runs: Iterable[RequestState]) -> None:
        """End ``runs`` as they are, wherever they are; return when they have ended."""
        aborted = frozenset(runs)
        for run in self._scheduler.remove(aborted):
            self._finish(run, FinishReason.ABORTED)
        await asyncio.sleep(0)  # requests that were just made have to be registered before they can be aborted
        requests = [request for request, run in self._running.items() if run in aborted]
        tasks = [self._following[request] for request in requests]
        if requests:
            await self.state.tell("abort", self.llm.abort(requests))
            await asyncio.wait(tasks)
        self._settle()

    def _end(self, error: HeadwayError) -> None:
        """Tell all clients that the engine has ended."""
        self._deliver()
        self.on_end(error)
        self._scheduler.clear()
        self.activity.running(0)
        self._settle()

    def _settle(self) -> None:
        """End a drain where nothing is left to run, and tell those who wait for that."""
        if self._scheduler.mode is Mode.DRAINING and not self._running and not self._scheduler.queued:
            self._scheduler.drained()
        # Set for the current waiters; later waiters get a new event.
        self._moved.set()
        self._moved = asyncio.Event()

    def _show(self) -> None:
        self.activity.running(len(self._running), halted=self.state.halted)

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Context in which no other command runs. Raises the engine's error if it ended, also while this one waited."""
        async with self._turn:
            self.state.check()
            yield
