"""The inside of a simulated replica: the waiting line, the slots, prefill, and the one timer. Nothing here is awaited.

    submit ─▶ waiting line ─slots, cache─▶ prefill ─▶ ProcessorSharing ─▶ finished groups, into their outboxes
                ▲     ▲                                 │     │
                │     └────── preempted ────────────────┘     │
                └──────────── cut by a pause ◀────────────────┘

The timer is set for what happens next by itself: a trajectory ends, the cache is full, a prefill that others wait for
ends. Every command first settles what was computed since the last one (`_settle`), then changes something, then lets
the replica go on (`_go_on`), which starts what may start and sets the timer.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from headway.data.types import FinishReason
from headway.interfaces import EngineStats, GenerateRequest, OnUpdate
from headway.simulate.activity import Activity
from headway.simulate.contention import Contention
from headway.simulate.costs import decode_cost
from headway.simulate.lengths import LengthSampler
from headway.simulate.profile import RolloutProfile
from headway.simulate.sharing import ROUNDING, ProcessorSharing
from headway.simulate.work import GroupRun, Outbox, TrajectoryRun, prefill_tokens


class DecodingReplica:
    """The decoding of one replica in virtual time. Runs on the loop that its commands are called from.

    Prefill is serial and stops decoding; what starts together is prefilled together, the prompt of a group only once. A
    pause breaks a prefill off, and it starts over; an abort lets it go on while anything is in a slot. In the KV cache
    every trajectory has its prompt to itself.
    """

    def __init__(
        self, name: str, profile: RolloutProfile, lengths: LengthSampler, contention: Contention | None = None
    ) -> None:
        self.version = 0
        """Stamped on every token that is sampled from now on; only to be changed while `stopped`."""
        self.stopped = asyncio.Event()
        """A pause is in force and nothing computes any more."""
        self.paused = False
        """A pause was asked for, and no `resume` since."""
        self._name = name
        self._profile = profile
        self._lengths = lengths

        self._serial = 0
        self._groups: dict[int, GroupRun] = {}
        """Unfinished ones by the serial of their first trajectory, in order of submission."""
        self._validation: deque[TrajectoryRun] = deque()
        self._training: deque[TrajectoryRun] = deque()
        self._held: list[TrajectoryRun] = []
        """Submitted since a pause began: they wait for `resume`."""
        self._cut: list[TrajectoryRun] = []
        """Trajectories that the present pause stopped; they keep their slots."""
        self._cost = decode_cost(profile)
        self._slower = 1.0
        """Factor by which everything takes longer, at present, than the profile says."""
        self._sharing = ProcessorSharing(self._cost, profile.kv_tokens)
        """All that is in a slot; it stands still while the replica prefills."""
        self._prefilling: list[TrajectoryRun] = []
        """Trajectories that are in their slots, but not in the cache before `_prefill_ends`."""
        self._prefill_tokens = 0
        self._prefill_began = 0.0
        self._prefill_ends = 0.0
        self._prefill_matters = False
        """The timer is set for the end of the prefill: something waits that could start then."""
        self._halted = False
        """A pause that cuts holds: nothing may start."""

        self._settled = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._activity = Activity()
        self._contention = contention
        if contention is not None:
            contention.add_replica(self.slow_down)
        self._reported_tokens = 0

    # ---------------------------------------------------------------- commands

    def submit(self, requests: Sequence[GenerateRequest], outbox: Outbox) -> None:
        """All at once; each group goes to ``outbox`` when it is finished."""
        for request in requests:
            group = GroupRun(request, outbox, self._lengths, self._serial)
            self._groups[self._serial] = group
            self._serial += request.n
            line = self._held if self.paused else self._line(group)
            line.extend(group.runs)
        if self._sharing.active < self._profile.slots:  # otherwise they wait, and nothing changes for the others
            self._go_on(self._settle())

    def abort(self, numbers: Sequence[int]) -> None:
        """End these training groups as they are."""
        wanted = set(numbers)
        now = self._settle()
        self._abort([group for group in self._training_groups() if group.request.number in wanted], now)

    def abort_older_than(self, version: int) -> list[int]:
        """End the training groups with a token of an older version; their numbers, in order of submission."""
        now = self._settle()
        overdue = [group for group in self._training_groups() if self._oldest(group) < version]
        self._abort(overdue, now)
        return _numbers(overdue)

    def drop(self, outbox: Outbox) -> None:
        """Forget what is unfinished of ``outbox``: nobody waits for it any more."""
        now = self._settle()
        dropped = {serial: group for serial, group in self._groups.items() if group.outbox is outbox}
        self._take_out(dropped.values())
        for serial in dropped:
            del self._groups[serial]
        self._go_on(now)

    def in_flight(self) -> list[int]:
        """Numbers of unfinished training groups, in order of submission."""
        self._go_on(self._settle())
        return _numbers(self._training_groups())

    def pause(self, policy: OnUpdate) -> int:
        """Begin to stop; how many trajectories with tokens that cut. Never weakens a pause that is in force."""
        now = self._settle()
        self.paused = True
        cut: list[TrajectoryRun] = []
        if policy is not OnUpdate.DRAIN:
            self._halted = True
            cut = self._cut_all()
        if policy is OnUpdate.INTERRUPT:
            self.free_cache()
        self._go_on(now)
        return sum(run.tokens > 0 for run in cut)

    def free_cache(self) -> None:
        """Drop the cache: what a pause has cut is prefilled again, and so is every prompt that was kept."""
        for run in self._cut:
            run.cached = False
        for group in self._groups.values():
            group.prefilled_by = None

    def resume(self) -> None:
        """Go on: first what was cut, in its slots."""
        now = self._settle()
        self.paused = self._halted = False
        self.stopped.set()  # whoever still waits for the end of a drain has to learn that it will not come
        self.stopped = asyncio.Event()
        for run in self._held:
            self._line(run.group).append(run)
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
        busy, slot_seconds, prefilled = self._activity.take(now)
        # Parts of a token count until a pause loses them: what was reported already is not taken back.
        sampled = max(self._reported_tokens, int(self._sharing.sampled + ROUNDING))
        generated, self._reported_tokens = sampled - self._reported_tokens, sampled
        waiting = len(self._validation) + len(self._training) + len(self._held) + len(self._cut)
        decode_steps, prefill_steps = self._activity.take_steps()
        return EngineStats(
            busy=busy,
            slot_seconds=slot_seconds,
            generated_tokens=generated,
            prefilled_tokens=prefilled,
            running=self._sharing.active,
            waiting=waiting,
            version=self.version,
            decode_steps=decode_steps,
            prefill_steps=prefill_steps,
        )

    # ---------------------------------------------------------------- who is where

    def _line(self, group: GroupRun) -> deque[TrajectoryRun]:
        return self._training if group.training else self._validation

    def _training_groups(self) -> Iterator[GroupRun]:
        return (group for group in self._groups.values() if group.training)

    def _oldest(self, group: GroupRun) -> float:
        """The oldest version that sampled a token of ``group``; infinite without a token. Versions only grow."""
        firsts = (
            run.spans[0][1] if run.spans else self.version
            for run in group.runs
            if run.spans or self._sharing.gained(run)
        )
        return min(firsts, default=math.inf)

    def _abort(self, groups: Sequence[GroupRun], now: float) -> None:
        for run in self._take_out(groups):
            self._finish(run, FinishReason.ABORTED, now)
        self._go_on(now)

    def _take_out(self, groups: Iterable[GroupRun]) -> list[TrajectoryRun]:
        """Take all that is unfinished of ``groups`` out of whatever it is in, with its whole tokens."""
        leaving = [run for group in groups for run in group.unfinished()]
        waiting = {run.serial for run in leaving if not run.segment}
        for run in leaving:
            if run.segment:
                self._sharing.leave(run, self.version)
        if waiting:
            for line in (self._validation, self._training, self._held, self._cut):
                kept = [run for run in line if run.serial not in waiting]
                line.clear()
                line.extend(kept)
        if not self._sharing.active:
            self._prefilling = []  # for nobody: broken off
        return leaving

    def _cut_all(self) -> list[TrajectoryRun]:
        """Stop all trajectories that decode or prefill. Each keeps its slot reserved."""
        cut = self._sharing.leave_all(self.version)
        for run in self._prefilling:
            run.cached, run.group.prefilled_by = False, None
        self._prefilling = []
        self._cut += cut
        return cut

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
            self._activity.decoded(active, (sharing.sampled - sampled) / active, now - since, cached)

    def _elapse(self, now: float) -> float:
        """Account for the time up to ``now``; returns from when on it was decoding, and not prefilling."""
        since, self._settled = self._settled, now
        self._activity.slot_seconds += self._sharing.active * (now - since)
        if self._prefilling:
            since = self._prefill_ends
            if now >= since:
                self._prefilled()
        return since

    def _go_on(self, now: float) -> None:
        """Start the trajectories that can start now, and set the timer for the replica's next own event."""
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
        self._timer = None
        now = asyncio.get_running_loop().time()
        if self._prefill_matters:
            self._prefill_ends = min(self._prefill_ends, now)  # a loop may call a rounding error early
            self._elapse(now)
        else:
            self._decode(self._sharing.decode_to_next, self._elapse(now), now)
            self._finish_complete(now)
            for run in self._sharing.preempt(self.version):
                self._line(run.group).appendleft(run)
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
            if line:
                break
        if starting:
            fresh = [run for run in starting if not run.cached]
            self._sharing.join(starting)
            self._prefill(fresh, now)

    def _prefill(self, runs: list[TrajectoryRun], now: float) -> None:
        """Prefill ``runs`` from now on. Nothing decodes before it ends, those that join with them included."""
        if tokens := prefill_tokens(runs, self.version):
            self._prefilling, self._prefill_tokens, self._prefill_began = runs, tokens, now
            seconds = self._profile.prefill_s + self._profile.prefill_token_s * tokens
            self._prefill_ends = now + seconds * self._slower
            if self._prefill_ends == now:
                self._elapse(now)

    def _prefilled(self) -> None:
        self._prefilling = []
        sharing, seconds = self._sharing, self._prefill_ends - self._prefill_began
        step_s = sharing.cost.step_s(sharing.active, sharing.cached)
        self._activity.prefilled(sharing.active, self._prefill_tokens, seconds, step_s, sharing.cached)

    def _finish_complete(self, now: float) -> None:
        for run in self._sharing.complete(self.version):
            self._finish(run, FinishReason.LENGTH if run.tokens >= run.group.max_tokens else FinishReason.STOP, now)

    def _finish(self, run: TrajectoryRun, reason: FinishReason, now: float) -> None:
        group = run.group
        if group.finish(run, self._name, reason, now):
            del self._groups[group.serial]


def _numbers(groups: Iterable[GroupRun]) -> list[int]:
    """Numbers of the groups, once each: two parts of a split group may be on one replica."""
    return list(dict.fromkeys(group.request.number for group in groups))
