"""The engine without its thread: commands and one decode step, synchronous and deterministic.

    submit ─▶ Scheduler ─take─▶ Batch ◀─▶ Runner (prefill, decode), sample ─▶ finished calls
                  ▲               │
                  └───────────────┘ put_back (an interrupt, or no memory)

A step is schedule ▶ launch ▶ read, and gives every active row exactly one token: decoding rows run one position; rows
that just started get theirs from their prefill. The rows of a step depend on the submitted calls and the steps so far,
never on the time. On a device that works asynchronously, a step is launched before the tokens of the step before are
read. Commands run between two steps. Commands that touch rows, weights or versions first read all launched tokens, so
that they find the same state as without running ahead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from headway.data.interfaces.rollout import Completion, EngineStats, GenerateRequest, OnUpdate, Paused
from headway.data.types import FinishReason, TrajectoryId
from headway.devices import GraphRecorder
from headway.engines.rollout.engine_activity import DecodeStep, NativeActivity
from headway.engines.rollout.native.decode_batch import DecodeBatch
from headway.engines.rollout.native.fused_forward import best_forward
from headway.engines.rollout.native.model_runner import ModelRunner
from headway.engines.rollout.native.supported_models import prepare_model
from headway.engines.rollout.scheduler import Mode, RequestState, Scheduler
from headway.engines.weights.served_weights import ServedWeights
from headway.errors import RunError, UpdateFailed
from headway.models.logprobs import PROBE_PREFILL, probe_sequences

Finished = tuple[Any, Completion]
"""A finished call and its client."""


class EngineCore:
    """Continuous batching over one model. Not thread-safe: one thread drives it.

    Args:
        model: a decoder on the device from which it is served; its first weights are version 0.
        name: name of the replica, for results and messages.
        seed: the run's seed; with a trajectory's id, a call's key and a position it determines the uniform number that
            samples a token.
        slots: number of calls that decode at once.
        max_context: most tokens of context and continuation together.
        max_batched_tokens: most tokens prefilled in one step; a single context may be longer.
        kv_cache_bytes: memory for decoding rows and for contexts kept for later calls. If it is short, contexts are
            prefilled again, and calls wait or are parked. Default: enough for ``slots`` of either kind.
        recorder: records decoding steps for replay.
        decode: function from token ids to text, to find stop strings; it also gets the stop token.
        clock: function that returns seconds, the same clock as the events'.
        temperature: temperature of the run's sampling, for `probe`; each request has its own.
    """

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
        recorder: GraphRecorder | None = None,
        decode: Callable[[Sequence[int]], str],
        clock: Callable[[], float] = time.monotonic,
        temperature: float = 1.0,
    ) -> None:
        self.name, self.slots = name, slots
        self._temperature = temperature
        self._clock = clock
        prepare_model(model, max_context)
        self._runner = ModelRunner(
            model, best_forward(model, max_context), slots, max_context, kv_cache_bytes, recorder
        )
        self._scheduler = Scheduler(seed=seed, max_context=max_context, vocabulary=self._runner.vocabulary)
        self._batch = DecodeBatch(name, self._runner, max_batched_tokens, decode)
        self._tree = self._batch.contexts.tree
        self.weights = ServedWeights.of(model, f"rollout engine {name}")  # after the runner, which may repack them
        self._finished: list[Finished] = []
        """Calls that have ended, until `take_finished`."""
        self._activity = NativeActivity(clock)
        self._in_place = True
        """True if calls keep the keys and values of old weights under new ones: after a pause with ``keep``."""
        self._asleep = False
        self.version = 0

    @property
    def reproducible(self) -> bool:
        """See `Capabilities`. Calls parked for lack of memory are prefilled again, which may change their last bits."""
        return self._runner.invariant and self._runner.roomy

    # ------------------------------------------------------------------------------------- commands

    def submit(self, client: Hashable, calls: Sequence[GenerateRequest]) -> None:
        """Queue all calls together, or none. Raises `DataError` for a call that cannot be served."""
        self._batch.contexts.expect(self._scheduler.submit(client, calls))

    def pause(self, policy: OnUpdate) -> Paused:
        """Start to drain, or stop now, as ``policy`` says; `draining` is True while a drain is under way."""
        # A drain while already paused does nothing: what the earlier pause kept stays kept.
        if policy is not OnUpdate.DRAIN or self._scheduler.mode is not Mode.PAUSED:
            self._in_place = policy is OnUpdate.KEEP
        # Before rows are parked: tokens that were launched belong to their calls.
        if policy is not OnUpdate.DRAIN:
            self._read(0)
        self._scheduler.pause(policy)
        interrupted = self._park() if policy is OnUpdate.INTERRUPT else 0
        self._settle()
        return Paused(interrupted)

    def resume(self) -> None:
        """Resume decoding. Raises `RunError` while asleep, and while no complete version is served."""
        if self._asleep:
            raise RunError(f"rollout engine {self.name} was told to resume while asleep; call wake() first")
        self.weights.state.check("resume")
        self._scheduler.resume()
        self._in_place = True

    def start_writing(self, version: int, start: Callable[[int], Any]) -> Any:
        """Have ``start`` receive ``version`` over the served weights; returns its result.

        Raises `UpdateFailed` unless the engine is paused and nothing decodes.
        """
        if self._scheduler.mode is not Mode.PAUSED:
            raise UpdateFailed(
                f"rollout engine {self.name} was told to receive version {version}, which writes over the weights that "
                "it decodes with, while it is not paused; call pause() first and wait for it, or set "
                "rollout.enable_dual_buffer"
            )
        return start(version)

    def activate(self, version: int, load: Callable[[], None]) -> float:
        """Call ``load``, and stamp ``version`` on tokens sampled from now on. Returns the seconds that it took.

        Decoding calls, and further calls of their episodes, keep their keys and values. After a drain or an interrupt
        there are none.
        """
        self._read(0)
        self._activity.stop()
        start = self._clock()
        load()
        self._runner.refresh()  # before anything is computed: copies of the weights are still the old version's
        self._batch.renew(in_place=self._in_place)
        self.version = version
        return self._clock() - start

    def abort(self, client: Hashable, numbers: Iterable[int]) -> None:
        """End these calls with the tokens they have."""
        self._end(self._scheduler.find(client, numbers))

    def abort_older_than(self, version: int) -> None:
        """End the unfinished training calls that have a token of a version older than ``version``."""
        self._read(0)
        # After the reading: a call's oldest version is set when its first token is read.
        self._end(self._scheduler.older_than(version))

    def forget(self, client: Hashable) -> None:
        """Stop and drop all calls of ``client``, and the contexts kept for its episodes."""
        self._end(self._scheduler.of(client))
        self._finished = [finished for finished in self._finished if finished[0] != client]
        self._scheduler.forget(client)
        self._tree.leave(client)

    def release(self, trajectories: Sequence[TrajectoryId]) -> None:
        """Free the contexts kept for further calls of these episodes."""
        self._tree.release(trajectories)

    def sleep(self, *, keep_weights: bool = True) -> None:
        """Free the KV cache and the weights' memory; decoding calls are parked. Raises `RunError` unless paused."""
        if self._scheduler.mode is not Mode.PAUSED:
            raise RunError(f"rollout engine {self.name} was told to sleep while decoding; pause it first")
        self.weights.state.check_unwritten("sleep")
        if not self._asleep:
            self._park()
            self._runner.release()  # after `_park`, which moves rows within the memory that this frees
            self._asleep = True
        self.weights.sleep(keep=keep_weights)

    def wake(self) -> None:
        """Allocate the memory of weights and KV cache again, and restore the weights if they were kept."""
        if self._asleep:
            self.weights.memory.restore()  # before the runner's, which derives copies from the weights
            self._runner.restore()
            self._asleep = False

    def probe(self) -> NDArray[np.float32] | None:
        """Return the log-probs [8] of the probe (`headway.models.logprobs`); None if contexts are too short for it.

        Decoding calls are not touched. Raises `RunError` while no complete version is served.
        """
        sequences = probe_sequences(self._scheduler.vocabulary)
        if sequences.shape[1] > self._runner.max_context:
            return None
        self._read(0)
        self.weights.state.check("probe")
        if not self.weights.memory.there:
            raise RunError(f"rollout engine {self.name} was told to probe while its weights sleep; call wake() first")
        self._activity.stop()
        return self._runner.score(sequences, PROBE_PREFILL, self._temperature).reshape(-1)

    def stats(self) -> EngineStats:
        """Return the engine's activity since the last call of this method."""
        stats = self._activity.take(self._batch.active, self._scheduler.waiting, self.version)
        stats.unpinned = self._tree.lost
        self._tree.lost = 0
        return stats

    # ------------------------------------------------------------------------------------- stepping

    @property
    def has_work(self) -> bool:
        """True if a step would sample a token, or return calls that have finished meanwhile."""
        return bool(self._finished) or self._computes

    @property
    def _computes(self) -> bool:
        if self._scheduler.mode is Mode.PAUSED or self.weights.state.problem is not None:
            return False
        return bool(self._batch.active or self._scheduler.queued)

    @property
    def draining(self) -> bool:
        return self._scheduler.mode is Mode.DRAINING

    def step(self) -> list[Finished]:
        """Schedule, launch, read: one token for every row. Returns the calls that have finished."""
        if not self._finished or self._computes:
            self.weights.state.check("decode")
            self._activity.begin()
            record = DecodeStep()
            record.preempted = self._preempt()
            admission = self._batch.admission()
            self._scheduler.take(self.slots - self._batch.active, admission)
            ahead = 0
            # Once all tokens are read, no remaining row is complete.
            if admission.shares or (self._batch.active and not (self._batch.unread and self._batch.rows.complete)):
                self._batch.launch(admission, self.version, record)
                ahead = self._runner.runs_ahead
            self._read(ahead)
            self._settle()
        return self.take_finished()

    def take_finished(self) -> list[Finished]:
        """Remove and return the calls that have finished."""
        finished, self._finished = self._finished, []
        return finished

    def _read(self, ahead: int) -> None:
        """Read the tokens of all steps but the last ``ahead``, and remove the rows that they end.

        If no row is left, all steps are read: the launched ones belong to rows that had ended.
        """
        while self._batch.unread > (ahead if self._batch.active else 0):
            record, now, ended = self._batch.read(self._clock)
            self._finished += [(run.client, self._scheduler.finish(run, reason, now)) for run, reason in ended]
            self._activity.end(record)

    def _preempt(self) -> int:
        """Make room for every row's next token; if memory is short, park the newest rows. Returns the number parked.

        Rows of validation are parked last. A parked call keeps its tokens, and is the first to resume.
        """
        batch, parked = self._batch, 0
        if not batch.fits:
            self._read(0)
            while batch.active and not batch.fits:
                latest = max(range(batch.active), key=lambda row: _later(batch.rows.runs[row]))
                self._scheduler.put_back([batch.remove(latest)])
                parked += 1
        batch.make_room()
        return parked

    # ------------------------------------------------------------------------------------- endings

    def _end(self, runs: Collection[RequestState]) -> None:
        """Abort calls, queued or decoding. Calls that have ended meanwhile finish normally."""
        if runs:
            self._read(0)
        wanted = frozenset(runs)  # some may have ended while tokens were read: they are in no row now
        rows = [row for row, run in enumerate(self._batch.rows.runs) if run in wanted]
        waiting = self._scheduler.remove(wanted)
        for run in waiting:
            if run.started is None:
                self._batch.contexts.drop_waiting(run)
        # The last row first: rows after a removed one move up, and earlier rows keep their numbers.
        ended = [self._batch.remove(row) for row in reversed(rows)] + waiting
        now = self._clock()
        self._finished += [(run.client, self._scheduler.finish(run, FinishReason.ABORTED, now)) for run in ended]
        self._settle()

    def _park(self) -> int:
        """Park every decoding call, keeping its tokens, and drop all keys and values. Returns the number of calls."""
        # The last row first: then no other row moves.
        parked = [self._batch.remove(row) for row in reversed(range(self._batch.active))]
        self._scheduler.put_back(parked)
        self._batch.contexts.clear()
        return len(parked)

    def _settle(self) -> None:
        """Close the busy span and end a drain, if nothing is left to compute."""
        if self.draining and not self._batch.active and not self._scheduler.queued:
            self._scheduler.drained()
        if not self._computes:
            self._activity.stop()


def _later(run: RequestState) -> tuple[bool, int]:
    """Return the sort key for parking, largest first: training before validation, then the newest call."""
    return run.trains, run.serial
