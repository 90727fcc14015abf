"""The engine without its thread: commands and one decode step, synchronous and deterministic.

    submit ─▶ Scheduler ─take─▶ Rows ◀─▶ Runner (prefill, decode, sample) ─▶ finished calls
                  ▲               │ put_back (an interrupt, or no memory)
                  └───────────────┘

A step is schedule ▶ run ▶ postprocess, and gives every active row exactly one token: rows that were decoding run one
position; rows that just started take theirs from their prefill. Which rows run in a step depends on what was submitted
and on the steps made so far, never on the time. Commands run between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from headway.data.types import FinishReason, TrajectoryId
from headway.engines.rollout.calls import OpenCalls
from headway.engines.rollout.native.activity import Activity, Step
from headway.engines.rollout.native.admission import Share, StepAdmission
from headway.engines.rollout.native.fused import best_forward
from headway.engines.rollout.native.graphs import Recorder
from headway.engines.rollout.native.prefixes import Prefixes
from headway.engines.rollout.native.prepare import prepare_model
from headway.engines.rollout.native.rows import Rows
from headway.engines.rollout.native.runner import Given, Runner
from headway.engines.rollout.native.seen import SeenTokens
from headway.engines.rollout.native.siblings import Siblings
from headway.engines.rollout.native.stop_strings import completed, window
from headway.engines.rollout.scheduler import Mode, Scheduler
from headway.engines.rollout.work import CallRun, not_finite
from headway.engines.served.weights import ServedWeights
from headway.errors import RunError, UpdateFailed
from headway.interfaces import Call, EngineStats, FinishedCall, OnUpdate, Paused
from headway.models.probe import PROBE_PREFILL, probe_sequences

Finished = tuple[str, FinishedCall]
"""A finished call and its client."""

KEPT_SHARE = 8
"""One in so many tokens of the KV cache's memory may be taken beside it, for prefills that calls wait for."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The work that one step does."""

    decoding: int
    """Number of rows that decode another token."""
    starting: list[CallRun]
    """Calls that start in this step, in the rows after the decoding ones."""
    shares: list[Share]
    """The same calls, by context."""
    positions: int
    """Number of positions of the longest row, its next token included."""


class EngineCore:
    """Continuous batching over one model. Not thread-safe: one thread drives it."""

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
        recorder: Recorder | None = None,
        decode: Callable[[Sequence[int]], str],
        clock: Callable[[], float],
        temperature: float = 1.0,
    ) -> None:
        self._name = name
        self._seed = seed
        self._max_context = max_context
        self._max_batched_tokens = max_batched_tokens
        self._vocabulary = len(model.get_input_embeddings().weight)
        self._decode_text = decode
        self._temperature = temperature
        self._clock = clock
        prepare_model(model, max_context)
        self._scheduler = Scheduler()
        self._rows = Rows(slots, max_context)
        self._seen = SeenTokens(slots, self._vocabulary, model.device)
        self._looks_for_text = False
        """True once a request with stop strings was submitted."""
        self._runner = Runner(
            model,
            best_forward(model, max_context),
            slots=slots,
            max_context=max_context,
            kv_cache_bytes=kv_cache_bytes,
            recorder=recorder,
        )
        self.weights = ServedWeights(model, f"rollout engine {name}")  # after the runner, which may repack them
        self._activity = Activity(clock)
        self._calls = OpenCalls()
        self._siblings = Siblings(max(max_context, self._runner.cache.tokens // KEPT_SHARE))
        self._prefixes = Prefixes(self._runner.cache)
        self._in_place = True
        """New weights find what goes on with the keys and values of old ones: nothing decodes at the end of a drain."""
        self._asleep = False
        self.version = 0

    @property
    def reproducible(self) -> bool:
        """See `Capabilities`. What is parked for want of memory is prefilled again, which may change its last bits."""
        return self._runner.invariant and self._runner.roomy

    # ------------------------------------------------------------------------------------- commands

    def submit(self, client: str, calls: Sequence[Call]) -> None:
        """Queue all calls at once, or none: raises `DataError` for one that cannot be served."""

        before: CallRun | None = None

        def check(call: Call, serial: int) -> CallRun:
            nonlocal before
            before = CallRun.of(
                call,
                client,
                seed=self._seed,
                serial=serial,
                max_context=self._max_context,
                vocabulary=self._vocabulary,
                like=before,
            )
            return before

        runs = self._calls.submit(client, calls, check)
        for run in runs:
            self._siblings.expect(run)
        self._scheduler.submit(runs)

    def pause(self, policy: OnUpdate) -> Paused:
        """Start to drain, or stop now; `draining` says whether the former is still under way."""
        if policy is not OnUpdate.DRAIN or self._scheduler.mode is not Mode.PAUSED:
            self._in_place = policy is OnUpdate.KEEP
        self._scheduler.pause(policy)
        interrupted = self._park() if policy is OnUpdate.INTERRUPT else 0
        self._settle()
        return Paused(interrupted)

    def resume(self) -> None:
        """Go on. Raises `RunError` while asleep, and while there is no whole version to sample from."""
        if self._asleep:
            raise RunError(f"rollout engine {self._name} was told to resume while asleep; call wake() first")
        self.weights.check("resume")
        self._scheduler.resume()
        self._in_place = True

    def check_paused(self, doing: str) -> None:
        """Raise `UpdateFailed` unless nothing decodes, nor will before `resume`."""
        if self._scheduler.mode is not Mode.PAUSED:
            raise UpdateFailed(
                f"rollout engine {self._name} was told to {doing}, which writes over the weights that it decodes with, "
                "while it is not paused; call pause() first and wait for it, or set rollout.enable_dual_buffer"
            )

    def activate(self, version: int, load: Callable[[], None]) -> float:
        """``load`` it into the model and stamp ``version`` on what is sampled from now on; seconds taken.

        Calls that are decoding go on with the keys and values that they have, and so do the further calls of their
        episodes; after a drain or an interrupt there are none.
        """
        self._activity.stop()
        start = self._clock()
        load()
        self._runner.refresh()
        self._siblings.drop()
        if self._in_place:
            self._prefixes.renew()
        else:
            self._prefixes.clear()
        self.version = version
        return self._clock() - start

    def abort(self, client: str, numbers: Iterable[int]) -> list[Finished]:
        """End these calls as they are."""
        return self._end(self._calls.find(client, numbers))

    def abort_older_than(self, version: int) -> list[Finished]:
        """End the unfinished training calls with a token of an older version."""
        return self._end(self._calls.older_than(version))

    def forget(self, client: str) -> None:
        """Stop and drop everything that ``client`` submitted, and what is kept for its episodes."""
        self._end(self._calls.of(client))
        self._calls.forget(client)
        self._prefixes.leave(client)

    def release(self, trajectories: Sequence[TrajectoryId]) -> None:
        """Give up what is kept for further calls of these episodes."""
        self._prefixes.release(trajectories)

    def sleep(self, *, keep_weights: bool = True) -> None:
        """Free the KV cache and the weights' memory; what was decoding is parked. Raises `RunError` unless paused."""
        if self._scheduler.mode is not Mode.PAUSED:
            raise RunError(f"rollout engine {self._name} was told to sleep while decoding; pause it first")
        self.weights.check_unwritten("sleep")
        if not self._asleep:
            self._park()
            self._runner.release()
            self._asleep = True
        self.weights.sleep(keep=keep_weights)

    def wake(self) -> None:
        """Take the memory again: the weights', with what was kept of them, and the KV cache's."""
        if self._asleep:
            self.weights.memory.restore()
            self._runner.restore()
            self._asleep = False

    def probe(self) -> NDArray[np.float32] | None:
        """Log-probs [8] of `headway.models.probe`'s sequences; None where a context is too short for them.

        Nothing that decodes is touched. Raises `RunError` while there is no whole version to compute with.
        """
        sequences = probe_sequences(self._vocabulary)
        if sequences.shape[1] > self._max_context:
            return None
        self.weights.check("probe")
        if not self.weights.memory.there:
            raise RunError(f"rollout engine {self._name} was told to probe while its weights sleep; call wake() first")
        self._activity.stop()
        return self._runner.score(sequences, PROBE_PREFILL, self._temperature).reshape(-1)

    def stats(self) -> EngineStats:
        """The engine's activity since the last call of this method."""
        self._activity.lost(self._prefixes.lost)
        return self._activity.take(self._rows.active, self._scheduler.waiting, self.version)

    # ------------------------------------------------------------------------------------- stepping

    @property
    def has_work(self) -> bool:
        """A step would sample something."""
        if self._scheduler.mode is Mode.PAUSED or self.weights.problem is not None:
            return False
        return bool(self._rows.active or self._scheduler.queued)

    @property
    def draining(self) -> bool:
        return self._scheduler.mode is Mode.DRAINING

    def step(self) -> list[Finished]:
        """Start what fits, sample one token for every active row, and return the calls that this finished."""
        self.weights.check("decode")
        with self._activity.step() as step:
            scheduled = self._schedule(step)
            logits = self._run(scheduled, step)
            finished = self._postprocess(scheduled.starting, logits)
        self._settle()
        return finished

    def _schedule(self, step: Step) -> Scheduled:
        """Choose the rows that go on and the calls that start, as memory and the prefill's budget allow."""
        step.preempted = self._preempt()
        decoding = self._rows.active
        admission = StepAdmission(
            rows=decoding,
            longest=self._longest,
            budget=self._max_batched_tokens,
            fits=self._runner.fits,
            kept=self._siblings.of,
            find=self._prefixes.find,
        )
        starting = self._scheduler.take(self._rows.slots - decoding, admission)
        return Scheduled(decoding, starting, admission.shares, admission.positions)

    def _run(self, scheduled: Scheduled, step: Step) -> torch.Tensor:
        """One forward pass over decoding rows and contexts. Returns the logits [A, V] of all rows, those that start
        last.
        """
        decoding, starting = scheduled.decoding, scheduled.starting
        missing = [share for share in scheduled.shares if share.missing]
        contexts = [Given(share.ids[share.found.length :], self._prefixes.gather(share.found)) for share in missing]
        tokens, lengths = self._rows.tokens[:decoding], self._rows.lengths[:decoding]
        decoded, prefilled = self._runner.step(tokens, lengths, contexts)
        lengths += 1
        logits = [decoded] if decoding else []
        if starting:
            self._reserve(decoding + len(starting), scheduled.positions)
            for share, result in zip(missing, prefilled, strict=True):
                share.prefilled = result
            logits.append(self._start(scheduled, step))
        step.active = self._rows.active
        step.cached = self._rows.cached
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _postprocess(self, starting: Sequence[CallRun], logits: torch.Tensor) -> list[Finished]:
        """Sample a token for every row, and take out the rows that it ends."""
        self._sample(logits)
        now = self._clock()
        for run in starting:
            run.begin(now, self.version)
        finished = []
        for row, reason in self._ended():
            run = self._rows.runs[row]
            ending = self._prefixes.ending(self._rows, row)
            self._remove(row)
            if ending is not None:
                self._prefixes.store(run, ending, self._runner.rows_of(self._rows.active))
            finished.append(self._finish(run, reason, now))
        return finished

    @property
    def _longest(self) -> int:
        """Positions that the longest row has."""
        return int(self._rows.lengths[: self._rows.active].max(initial=0))

    def _preempt(self) -> int:
        """Make room for every row's next token; where there is not enough, the rows that came last are parked.

        Those of validation only when no others are left. All keep what they wrote, and are the first to go on. Returns
        how many were parked.
        """
        before = self._rows.active
        while (active := self._rows.active) and not self._runner.fits(active, self._longest + 1):
            latest = max(range(active), key=lambda row: _later(self._rows.runs[row]))
            self._scheduler.put_back([self._remove(latest)])
        self._reserve(active, self._longest + 1)
        return before - active

    def _reserve(self, rows: int, positions: int) -> None:
        """Make room for so many rows, the longest of ``positions``; blocks give way."""
        self._prefixes.reserve(self._runner.rows_of(rows), positions, self._rows.lengths[: self._rows.active])

    def _start(self, scheduled: Scheduled, step: Step) -> torch.Tensor:
        """Give the calls that start the next rows, their contexts in the cache; logits [S, V] of their next tokens."""
        first = self._rows.active
        for row, run in enumerate(scheduled.starting, first):
            self._rows.add(run)
            sampling = run.call.sampling
            if sampling.repetition_penalty != 1:
                self._seen.add(row, run.context)
            self._looks_for_text = self._looks_for_text or bool(sampling.stop)
        logits: list[torch.Tensor | None] = [None] * len(scheduled.starting)
        for share in scheduled.shares:
            prefilled = share.prefilled
            assert prefilled is not None
            step.prefilled += share.missing
            step.found += len(share.ids) * len(share.runs) - share.missing
            for run, place in zip(share.runs, share.places, strict=True):
                if run.fresh:
                    run.cached = len(share.ids) - (share.missing if run is share.runs[0] else 0)
                    self._siblings.started(run)
                self._prefixes.begin(run, share.shared)
                logits[place] = prefilled.logits
            if share.shared == len(share.ids):
                self._siblings.keep(share.runs[0], prefilled)
            for rows in neighbours(share.places):
                self._runner.fill(range(first + rows.start, first + rows.stop), prefilled)
        return torch.stack([one for one in logits if one is not None])

    def _sample(self, logits: torch.Tensor) -> None:
        """Sample from ``logits`` [A, V], one row each, and record the tokens."""
        params = [run.call.sampling for run in self._rows.runs]
        rows, seen = self._rows, self._seen.of(self._rows.active)
        tokens, logprobs = self._runner.sample(logits, params, rows.uniforms(), rows.written, seen)
        if not np.isfinite(logprobs).all():
            raise not_finite(self._name, self.version)
        self._rows.record(tokens, logprobs, self.version)
        if seen is not None:
            penalised = [row for row, p in enumerate(params) if p.repetition_penalty != 1]
            self._seen.record(penalised, tokens[penalised])

    def _ended(self) -> list[tuple[int, FinishReason]]:
        """Rows that just got their last token, and why; the last row first."""
        ended = dict(self._rows.ended())
        for row, run in enumerate(self._rows.runs) if self._looks_for_text else ():
            sampling = run.call.sampling
            if not sampling.stop or self._rows.written[row] <= sampling.min_tokens:
                continue
            tail = self._rows.tail(row, window(sampling.stop)).tolist()
            if completed(tail, sampling.stop, self._decode_text):
                ended[row] = FinishReason.STOP
        return sorted(ended.items(), reverse=True)

    # ------------------------------------------------------------------------------------- endings

    def _remove(self, row: int) -> CallRun:
        """Free a row; the last one moves into its place, in the cache too."""
        run, moved = self._rows.remove(row)
        self._prefixes.end(run)
        if moved != row:
            self._runner.cache.move(moved, row, int(self._rows.lengths[row]))
            self._seen.move(moved, row)
        return run

    def _finish(self, run: CallRun, reason: FinishReason, now: float) -> Finished:
        self._calls.remove(run)
        return run.client, run.finish(reason, now)

    def _end(self, runs: Collection[CallRun]) -> list[Finished]:
        """Abort calls, wherever they are."""
        wanted = frozenset(runs)
        rows = [row for row, run in enumerate(self._rows.runs) if run in wanted]
        waiting = self._scheduler.remove(wanted)
        for run in waiting:
            if run.fresh:
                self._siblings.started(run)
        ended = [self._remove(row) for row in reversed(rows)] + waiting
        now = self._clock()
        finished = [self._finish(run, FinishReason.ABORTED, now) for run in ended]
        self._settle()
        return finished

    def _park(self) -> int:
        """Take every decoding call off its row, keeping its tokens, and drop all that was computed for those to come.

        Returns how many there were.
        """
        parked = [self._remove(row) for row in reversed(range(self._rows.active))]
        self._scheduler.put_back(parked)
        self._siblings.drop()
        self._prefixes.clear()
        return len(parked)

    def _settle(self) -> None:
        """Close the busy span and end a drain, where nothing is left to compute."""
        if self.draining and not self._rows.active and not self._scheduler.queued:
            self._scheduler.drained()
        if not self.has_work:
            self._activity.stop()


def _later(run: CallRun) -> tuple[bool, int]:
    """Sorts by who has to give way: training before validation, then the younger."""
    return run.trains, run.serial


def neighbours(places: Sequence[int]) -> Iterator[range]:
    """Cut increasing ``places`` into ranges without a gap."""
    start = 0
    for index, place in enumerate(places):
        if index + 1 == len(places) or places[index + 1] != place + 1:
            yield range(places[start], place + 1)
            start = index + 1
