"""Core of a simulated replica: waiting queue, slots, prefill and a single timer. Nothing here is awaited.

    submit ─▶ waiting line ─slots, cache─▶ prefill ─▶ ProcessorSharing ─▶ finished calls, a batch for each client
                ▲     ▲                                 │     │
                │     └────── preempted ────────────────┘     │
                └──────────── cut by a pause ◀────────────────┘

The timer is set for what happens next by itself: a call ends, the cache is full, a prefill that others wait for
ends. Every command first settles what was computed since the last one (`_settle`), then changes something, then lets
the replica go on (`_go_on`), which starts what may start and sets the timer.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from headway.data.interfaces.rollout import Completion, EngineStats, GenerateRequest, OnUpdate
from headway.data.types import FinishReason, TrajectoryId
from headway.errors import DataError
from headway.planner.profiles.costs import Contention, decode_cost
from headway.planner.profiles.job_profile import RolloutProfile
from headway.planner.profiles.lengths import LengthSampler, lengths_id
from headway.planner.simulation.processor_sharing import (
    ROUNDING,
    ProcessorSharing,
    SimulatedActivity,
    SimulatedCall,
    SimulatedPrefixCache,
)

Deliver = Callable[[str, Sequence[Completion]], None]
"""Takes a client's calls that are finished at one moment."""


class DecodingReplica:
    """The decoding of one replica in virtual time. Runs on the loop that its commands are called from.

    Prefill is serial and stops decoding; what starts together is prefilled together, a context that calls share only
    once. A pause breaks a prefill off, and it starts over; an abort lets it go on while anything is in a slot. In the
    KV cache every call has its context to itself.
    """

    def __init__(
        self,
        name: str,
        profile: RolloutProfile,
        lengths: LengthSampler,
        deliver: Deliver,
        contention: Contention | None = None,
    ) -> None:
        self.version = 0
        """Version of all tokens that are sampled from now on."""
        self.stopped = asyncio.Event()
        """Event that is set while a pause is in force and nothing computes."""
        self.paused = False
        """True from a pause to the next `resume`."""
        self._name = name
        self._profile = profile
        self._lengths = lengths
        self._deliver = deliver

        self._serial = 0
        self._runs: dict[tuple[str, int], SimulatedCall] = {}
        """Unfinished calls by client and number, in order of submission."""
        self._ended: dict[str, list[Completion]] = {}
        """Calls that have just ended, by client."""
        self._validation: deque[SimulatedCall] = deque()
        self._training: deque[SimulatedCall] = deque()
        self._held: list[SimulatedCall] = []
        """Submitted since a pause began: they wait for `resume`."""
        self._cut: list[SimulatedCall] = []
        """Runs that the present pause stopped; they keep their slots."""
        self._cost = decode_cost(profile)
        self._slower = 1.0
        """Factor by which everything takes longer, at present, than the profile says."""
        self._sharing = ProcessorSharing(self._cost, profile.kv_tokens)
        """All that is in a slot; it stands still while the replica prefills."""
        self._prefixes = SimulatedPrefixCache()
        self._prefilling: list[SimulatedCall] = []
        """Runs that are in their slots, but not in the cache before `_prefill_ends`."""
        self._prefill_tokens = 0
        self._prefill_found = 0
        self._prefill_began = 0.0
        self._prefill_ends = 0.0
        self._prefill_matters = False
        """True where the timer is set for the end of the prefill: something waits that could start then."""
        self._halted = False
        """True during a pause that cuts: nothing may start."""
        self._in_place = False
        """True where calls that the present pause has cut go on with what they have in the cache."""

        self._settled = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._activity = SimulatedActivity()
        self._contention = contention
        if contention is not None:
            contention.add_replica(self.slow_down)
        self._reported_tokens = 0

    # ---------------------------------------------------------------- commands

    def submit(self, client: str, calls: Sequence[GenerateRequest]) -> None:
        """Take all calls at once. They come back from ``deliver`` when they are finished.

        Raises `DataError` for a number that an open call of ``client`` has.
        """
        numbers = {(client, call.number) for call in calls}
        if len(numbers) < len(calls) or not self._runs.keys().isdisjoint(numbers):
            raise DataError(f"client {client} submitted a call under a number that another of its open calls has")
        for call in calls:
            length = min(self._lengths(lengths_id(call.trajectory, call.key)), call.sampling.max_tokens)
            run = SimulatedCall(call, client, self._serial, length, self._prefixes.open(call))
            self._runs[client, call.number] = run
            self._serial += 1
            (self._held if self.paused else self._line(run)).append(run)
        if self._sharing.active < self._profile.slots:  # otherwise they wait, and nothing changes for the others
            self._go_on(self._settle())

    def abort(self, client: str, numbers: Sequence[int]) -> None:
        """End these calls of ``client`` as they are."""
        now = self._settle()
        # Each once: a call whose number is given twice would be finished twice.
        named = (self._runs.get((client, number)) for number in dict.fromkeys(numbers))
        self._abort([run for run in named if run is not None], now)

    def abort_older_than(self, version: int) -> None:
        """End the training calls with a token of an older version."""
        now = self._settle()
        self._abort([run for run in self._runs.values() if run.training and self._oldest(run) < version], now)

    def drop(self, client: str) -> None:
        """Drop the unfinished calls of ``client``, which has left, and all that is kept for it."""
        now = self._settle()
        dropped = [run for run in self._runs.values() if run.client == client]
        self._take_out(dropped)
        for run in dropped:
            self._forget(run)
        self._prefixes.leave(client)
        self._ended.pop(client, None)
        self._go_on(now)

    def release(self, episodes: Iterable[TrajectoryId]) -> None:
        """Give up what is kept for further calls of ``episodes``."""
        self._prefixes.release(episodes)

    def pause(self, policy: OnUpdate) -> int:
        """Begin to stop; how many calls with tokens that cut. Never weakens a pause that is in force."""
        now = self._settle()
        self.paused = True
        cut: list[SimulatedCall] = []
        if policy is not OnUpdate.DRAIN:
            self._in_place = policy is OnUpdate.KEEP
            self._halted = True
            cut = self._sharing.leave_all(self.version)
            self._break_off()
            self._cut += cut  # each keeps its slot reserved
        if policy is OnUpdate.INTERRUPT:
            self.free_cache()
        self._go_on(now)
        return sum(run.tokens > 0 for run in cut)

    def free_cache(self) -> None:
        """Drop the cache: what a pause has cut is prefilled again, and so is every context that was kept."""
        for run in self._cut:
            run.cached = False
        self._prefixes.clear()

    def load(self, version: int) -> None:
        """Sample with ``version`` from now on. Only while `stopped`."""
        self.version = version
        if self._in_place:
            self._prefixes.go_on_in_place(version)

    def resume(self) -> None:
        """Go on: first what was cut, in its slots."""
        now = self._settle()
        self.paused = self._halted = self._in_place = False
        self.stopped.set()  # whoever still waits for the end of a drain has to learn that it will not come
        self.stopped = asyncio.Event()
        for run in self._held:
            self._line(run).append(run)
        self._held = []
        self._go_on(now)

    def slow_down(self, factor: float) -> None:
        """Make everything take ``factor`` times as long as the profile says, from now on."""
        now = self._settle()
        if self._prefilling:
            self._prefill_ends = now + (self._prefill_ends - now) * factor / self._slower
        self._slower = factor
        self._sharing.cost = self._cost if factor == 1.0 else self._cost.slower(factor)
        self._go_on(now)

    def stats(self) -> EngineStats:
        """Activity since the last call."""
        now = self._settle()
        self._go_on(now)
        stats = self._activity.take(now)
        # Parts of a token count until a pause loses them: what was reported already is not taken back.
        sampled = max(self._reported_tokens, int(self._sharing.sampled + ROUNDING))
        stats.generated_tokens, self._reported_tokens = sampled - self._reported_tokens, sampled
        stats.running, stats.version = self._sharing.active, self.version
        stats.waiting = len(self._validation) + len(self._training) + len(self._held) + len(self._cut)
        return stats

    # ---------------------------------------------------------------- who is where

    def _line(self, run: SimulatedCall) -> deque[SimulatedCall]:
        return self._training if run.training else self._validation

    def _oldest(self, run: SimulatedCall) -> float:
        """The oldest version that sampled a token of ``run``; infinite without a token. Versions only grow."""
        if run.spans:
            return run.spans[0][1]
        return self.version if self._sharing.gained(run) else math.inf

    def _abort(self, runs: Sequence[SimulatedCall], now: float) -> None:
        self._take_out(runs)
        for run in runs:
            self._finish(run, FinishReason.ABORTED, now)
        self._go_on(now)

    def _take_out(self, runs: Iterable[SimulatedCall]) -> None:
        """Remove ``runs`` from batch and queues, with their whole tokens."""
        waiting = set()
        for run in runs:
            if run.segment:
                self._sharing.leave(run, self.version)
            else:
                waiting.add(run.serial)
        if waiting:
            for line in (self._validation, self._training, self._held, self._cut):
                kept = [run for run in line if run.serial not in waiting]
                line.clear()
                line.extend(kept)
        if not self._sharing.active:
            self._break_off()  # no run is left for this prefill

    def _break_off(self) -> None:
        """End a prefill before it has computed anything."""
        for run in self._prefilling:
            run.cached, run.prompt.computed_by = False, None
        self._prefilling = []

    # ---------------------------------------------------------------- time

    def _settle(self) -> float:
        """Bring everything up to now: what was computed since the last time, and who finished just now."""
        now = asyncio.get_running_loop().time()
        if now > self._settled:
            since = self._elapse(now)
            if now > since:
                self._decode(self._sharing.decode, since, now)
            self._finish_complete(now)
        return now

    def _decode(self, move: Callable[[float, float], None], since: float, now: float) -> None:
        sharing = self._sharing
        active, cached, sampled = sharing.active, sharing.cached, sharing.sampled
        move(since, now)
        if active:
            self._fit_prefixes()
            self._activity.decoded(active, (sharing.sampled - sampled) / active, now - since, cached)

    def _elapse(self, now: float) -> float:
        """Account for the time up to ``now``; returns from when on it was decoding, and not prefilling."""
        since, self._settled = self._settled, now
        self._activity.stats.slot_seconds += self._sharing.active * (now - since)
        if self._prefilling:
            since = self._prefill_ends
            if now >= since:
                self._prefilled()
        return since

    def _go_on(self, now: float) -> None:
        """Hand on what has ended, start what can start now, and set the timer for the replica's next own event."""
        if self._ended:
            ended, self._ended = self._ended, {}
            for client, calls in ended.items():
                self._deliver(client, calls)
        if not (self._prefilling or self._halted):
            self._start(now)
        when = self._sharing.until_next() + (self._prefill_ends if self._prefilling else now)
        computing = when < math.inf
        self._prefill_matters = bool(
            self._prefilling and (self._training or self._validation) and self._sharing.active < self._profile.slots
        )
        if self._prefill_matters:
            when = self._prefill_ends
        self._set_timer(when)
        self._activity.computes(now, computing)
        if self._contention is not None:
            self._contention.replica_computes(self._name, computing)
        if self.paused and not computing:
            self.stopped.set()

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            if self._timer.when() == when:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when, self._on_timer) if when < math.inf else None

    def _on_timer(self) -> None:
        # First: `_set_timer` would take a timer of the same time for one that is still to come.
        self._timer = None
        now = asyncio.get_running_loop().time()
        if self._prefill_matters:
            self._prefill_ends = min(self._prefill_ends, now)  # a loop may call a rounding error early
            self._elapse(now)
        else:
            self._decode(self._sharing.decode_to_next, self._elapse(now), now)
            self._finish_complete(now)
            for run in self._sharing.preempt(self.version):
                self._line(run).appendleft(run)
        self._go_on(now)

    def _start(self, now: float) -> None:
        """Put into slots what was cut, then what waits, validation first, as far as slots and cache allow."""
        if not (self._training or self._validation or self._cut):
            return
        starting, self._cut = self._cut, []
        free = self._profile.slots - self._sharing.active - len(starting)
        cached = sum(run.context for run in starting) if starting else 0
        for line in (self._validation, self._training):
            while line and free and self._sharing.fits(line[0], len(starting), cached):
                run = line.popleft()
                starting.append(run)
                free -= 1
                cached += run.context
            # A run without room also blocks the runs after it: training does not overtake validation.
            if line:
                break
        if starting:
            fresh = [run for run in starting if not run.cached]
            self._sharing.join(starting)
            self._prefill(fresh, now)
            self._fit_prefixes()

    def _prefill(self, runs: list[SimulatedCall], now: float) -> None:
        """Prefill ``runs`` from now on. Nothing decodes before it ends, those that join with them included."""
        tokens = sum(self._prefixes.prefill(run, self.version) for run in runs)
        found = sum(run.found for run in runs if not run.tokens)
        if tokens:
            self._prefilling, self._prefill_began = runs, now
            self._prefill_tokens, self._prefill_found = tokens, found
            seconds = self._profile.prefill_s + self._profile.prefill_token_s * tokens
            self._prefill_ends = now + seconds * self._slower
            if self._prefill_ends == now:
                self._elapse(now)
        else:
            self._activity.stats.cached_tokens += found

    def _prefilled(self) -> None:
        self._prefilling = []
        sharing, seconds = self._sharing, self._prefill_ends - self._prefill_began
        step_s = sharing.cost.step_s(sharing.active, sharing.cached)
        self._activity.prefilled(sharing.active, self._prefill_tokens, seconds, step_s, sharing.cached)
        self._activity.stats.cached_tokens += self._prefill_found

    def _fit_prefixes(self) -> None:
        """Keep no more for further calls than the cache has room for beside what decodes."""
        if self._profile.kv_tokens is not None:
            self._prefixes.fit(self._profile.kv_tokens - self._sharing.cached)

    def _finish_complete(self, now: float) -> None:
        for run in self._sharing.complete(self.version):
            if run.call.goes_on:
                self._prefixes.keep(run, self.version)
            cut_off = run.tokens >= run.call.sampling.max_tokens
            self._finish(run, FinishReason.LENGTH if cut_off else FinishReason.STOP, now)

    def _finish(self, run: SimulatedCall, reason: FinishReason, now: float) -> None:
        self._forget(run)
        self._ended.setdefault(run.client, []).append(run.finished(reason, now))

    def _forget(self, run: SimulatedCall) -> None:
        del self._runs[run.client, run.call.number]
        self._prefixes.close(run)
