"""The engine without its thread: commands and one decode step, synchronous and deterministic.

    submit ─▶ Scheduler ─take─▶ Rows ◀─▶ Runner (prefill, decode, sample) ─▶ finished groups
                  ▲ put_back (an interrupt, or no memory)

A step is schedule ▶ run ▶ postprocess, and gives every active row exactly one token: rows that were decoding run one
position; rows that just started take theirs from their prefill. Which rows run in a step depends on what was submitted
and on the steps made so far, never on the time. Commands run between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from headway.data.types import FinishReason
from headway.engines.rollout.groups import Groups, numbered, owned_by
from headway.engines.rollout.native.activity import Activity, Step
from headway.engines.rollout.native.admission import StepAdmission
from headway.engines.rollout.native.fused import best_forward
from headway.engines.rollout.native.graphs import Recorder
from headway.engines.rollout.native.prepare import prepare_model
from headway.engines.rollout.native.rows import Rows
from headway.engines.rollout.native.runner import Runner
from headway.engines.rollout.native.seen import SeenTokens
from headway.engines.rollout.native.stop_strings import completed, window
from headway.engines.rollout.scheduler import Mode, Scheduler
from headway.engines.rollout.work import GroupRun, Prefilled, TrajectoryRun, not_finite
from headway.engines.served.weights import ServedWeights
from headway.errors import RunError, UpdateFailed
from headway.interfaces import EngineStats, FinishedGroup, GenerateRequest, OnUpdate, Paused, Priority
from headway.models.probe import PROBE_PREFILL, probe_sequences

Finished = tuple[Hashable, FinishedGroup]
"""A finished group and its owner."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The work that one step does."""

    decoding: int
    """Number of rows that decode another token."""
    starting: list[TrajectoryRun]
    """Trajectories that start in this step, in the rows after the decoding ones."""
    missing: list[range]
    """Contexts that have to be prefilled, each as the places in ``starting`` of those that go on from it."""
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
        self._groups = Groups()
        self._asleep = False
        self.version = 0

    @property
    def reproducible(self) -> bool:
        """See `Capabilities`. What is parked for want of memory is prefilled again, which may change its last bits."""
        return self._runner.invariant and self._runner.roomy

    # ------------------------------------------------------------------------------------- commands

    def submit(self, requests: Sequence[GenerateRequest], owner: Hashable) -> None:
        """Queue all requests at once, or none: raises `DataError` for one that cannot be served."""

        def check(request: GenerateRequest, serial: int) -> GroupRun:
            return GroupRun.of(
                request,
                owner,
                seed=self._seed,
                serial=serial,
                max_context=self._max_context,
                vocabulary=self._vocabulary,
            )

        self._scheduler.submit(self._groups.submit(requests, check))

    def pause(self, policy: OnUpdate) -> Paused:
        """Start to drain, or stop now; `draining` says whether the former is still under way."""
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

    def check_paused(self, doing: str) -> None:
        """Raise `UpdateFailed` unless nothing decodes, nor will before `resume`."""
        if self._scheduler.mode is not Mode.PAUSED:
            raise UpdateFailed(
                f"rollout engine {self._name} was told to {doing}, which writes over the weights that it decodes with, "
                "while it is not paused; call pause() first and wait for it, or set rollout.enable_dual_buffer"
            )

    def activate(self, version: int, load: Callable[[], None]) -> float:
        """``load`` it into the model and stamp ``version`` on what is sampled from now on; seconds taken.

        Trajectories that are decoding go on with the keys and values that they have.
        """
        self._activity.stop()
        start = self._clock()
        load()
        self._runner.refresh()
        for group in self._groups:
            group.prefilled = None  # its logits are the old version's
        self.version = version
        return self._clock() - start

    def abort(self, numbers: Iterable[int]) -> list[Finished]:
        """End these training groups as they are."""
        return self._end(numbered(tuple(numbers)))

    def older_than(self, version: int) -> list[int]:
        """Numbers of unfinished training groups with a token of an older version, in order of submission."""
        return self._groups.older_than(version)

    def forget(self, owner: Hashable) -> None:
        """Stop and drop everything that ``owner`` submitted."""
        self._end(owned_by(owner))

    def in_flight(self) -> list[int]:
        """Numbers of unfinished training groups, in order of submission."""
        return self._groups.in_flight()

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
        """Start what fits, sample one token for every active row, and return the groups that this finished."""
        self.weights.check("decode")
        with self._activity.step() as step:
            scheduled = self._schedule(step)
            logits = self._run(scheduled, step)
            finished = self._postprocess(scheduled.starting, logits)
        self._settle()
        return finished

    def _schedule(self, step: Step) -> Scheduled:
        """Choose the rows that go on and the trajectories that start, as memory and the prefill's budget allow."""
        step.preempted = self._preempt()
        decoding = self._rows.active
        admission = StepAdmission(
            rows=decoding, longest=self._longest, budget=self._max_batched_tokens, fits=self._runner.fits
        )
        starting = self._scheduler.take(self._rows.slots - decoding, admission)
        # The contexts that they go on from and that no prefill of before was kept for.
        to_prefill = [share for share in shared_contexts(starting) if self._kept(starting[share.start]) is None]
        return Scheduled(decoding, starting, to_prefill, admission.positions)

    def _run(self, scheduled: Scheduled, step: Step) -> torch.Tensor:
        """One forward pass over decoding rows and contexts. Returns the logits [A, V] of all rows, those that start
        last.
        """
        decoding, starting = scheduled.decoding, scheduled.starting
        contexts = [starting[share.start].context for share in scheduled.missing]
        step.prefilled = sum(map(len, contexts))
        tokens, lengths = self._rows.tokens[:decoding], self._rows.lengths[:decoding]
        decoded, prefilled = self._runner.step(tokens, lengths, contexts)
        lengths += 1
        logits = [decoded] if decoding else []
        if starting:
            self._runner.cache.reserve(decoding + len(starting), scheduled.positions, lengths)
            logits.append(torch.stack(self._start(starting, dict(zip(scheduled.missing, prefilled, strict=True)))))
        step.active = self._rows.active
        step.cached = self._rows.cached
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _postprocess(self, starting: Sequence[TrajectoryRun], logits: torch.Tensor) -> list[Finished]:
        """Sample a token for every row, and take out the rows that it ends."""
        self._sample(logits)
        now = self._clock()
        for run in starting:
            run.started = now if run.started is None else run.started
            if run.group.oldest_version is None:
                run.group.oldest_version = self.version
        ended = [(self._remove(row), reason) for row, reason in self._ended()]
        return [group for run, reason in ended for group in self._finish(run, reason, now)]

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
        self._runner.cache.reserve(active, self._longest + 1, self._rows.lengths[:active])
        return before - active

    def _kept(self, run: TrajectoryRun) -> Prefilled | None:
        """A group's prompt is run once for all its fresh trajectories, and kept for those that start later."""
        return run.group.prefilled if run.fresh else None

    def _start(self, runs: list[TrajectoryRun], prefilled: Mapping[range, Prefilled]) -> list[torch.Tensor]:
        """Give ``runs`` the next rows, their contexts in the cache; logits [V] of each one's next token."""
        first = self._rows.active
        for row, run in enumerate(runs, first):
            self._rows.add(run)
            sampling = run.group.request.sampling
            if sampling.repetition_penalty != 1:
                self._seen.add(row, run.context)
            self._looks_for_text = self._looks_for_text or bool(sampling.stop)
        logits: list[torch.Tensor] = []
        for share in shared_contexts(runs):
            leader = runs[share.start]
            context = prefilled.get(share) or self._kept(leader)
            assert context is not None
            if leader.fresh:
                leader.group.place(len(share), context)
            self._runner.cache.fill(range(first + share.start, first + share.stop), context.kv)
            logits += [context.logits] * len(share)
        return logits

    def _sample(self, logits: torch.Tensor) -> None:
        """Sample from ``logits`` [A, V], one row each, and record the tokens."""
        params = [run.group.request.sampling for run in self._rows.runs]
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
            sampling = run.group.request.sampling
            if not sampling.stop or self._rows.written[row] <= sampling.min_tokens:
                continue
            tail = self._rows.tail(row, window(sampling.stop)).tolist()
            if completed(tail, sampling.stop, self._decode_text):
                ended[row] = FinishReason.STOP
        return sorted(ended.items(), reverse=True)

    # ------------------------------------------------------------------------------------- endings

    def _remove(self, row: int) -> TrajectoryRun:
        """Free a row; the last one moves into its place, in the cache too."""
        run, moved = self._rows.remove(row)
        if moved != row:
            self._runner.cache.move(moved, row, int(self._rows.lengths[row]))
            self._seen.move(moved, row)
        return run

    def _finish(self, run: TrajectoryRun, reason: FinishReason, now: float) -> list[Finished]:
        group = run.group
        done = group.finish(run, reason, replica=self._name, text=self._decode_text, finished=now)
        if done is None:
            return []
        self._groups.remove(group)
        return [(group.owner, done)]

    def _end(self, belongs: Callable[[GroupRun], bool]) -> list[Finished]:
        """Abort every trajectory of the groups that ``belongs`` names, wherever it is."""
        rows = [row for row, run in enumerate(self._rows.runs) if belongs(run.group)]
        ended = [self._remove(row) for row in reversed(rows)] + self._scheduler.remove(belongs)
        now = self._clock()
        finished = [group for run in ended for group in self._finish(run, FinishReason.ABORTED, now)]
        self._settle()
        return finished

    def _park(self) -> int:
        """Take every decoding trajectory off its row, keeping its tokens. Returns their number."""
        parked = [self._remove(row) for row in reversed(range(self._rows.active))]
        self._scheduler.put_back(parked)
        for group in self._groups:
            group.prefilled = None
        return len(parked)

    def _settle(self) -> None:
        """Close the busy span and end a drain, where nothing is left to compute."""
        if self.draining and not self._rows.active and not self._scheduler.queued:
            self._scheduler.drained()
        if not self.has_work:
            self._activity.stop()


def _later(run: TrajectoryRun) -> tuple[bool, int]:
    """Sorts by who has to give way: training before validation, then the younger."""
    return run.group.request.priority is Priority.TRAINING, run.serial


def shared_contexts(runs: Sequence[TrajectoryRun]) -> Iterator[range]:
    """Ranges of neighbours that go on from the same context: the fresh ones of a group together, others alone."""
    start = 0
    for index, run in enumerate(runs):
        following = runs[index + 1] if index + 1 < len(runs) else None
        shared = following is not None and run.fresh and following.fresh and following.group is run.group
        if not shared:
            yield range(start, index + 1)
            start = index + 1
