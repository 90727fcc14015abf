"""Decoding as processor sharing: a completion costs O(log active), a token costs nothing.

    service   tokens that a run would have that had decoded from the start: the same for all, so each one's end
              is fixed when it joins (service then + tokens left), and the next to end is a heap's minimum

Service moves by `DecodeCost`'s closed forms. It is continuous: a run that joins between two steps of the others gets
its tokens between theirs, and a run that stops between two of its own keeps the whole tokens.

`SimulatedCall` is a call on its way, `SimulatedActivity` the record of what a replica computed, `SimulatedPrefixCache`
the tokens that need no prefill. Contexts have lengths and no contents here, so prefixes are found by episode. First
calls of one prompt share a context of the same length while one of them is open. A further call of an episode begins
with what its last finished call left in the cache; if it continues only a part of that, all of its ids are the number
of tokens in that part (`headway.planner.simulation.simulated_prompts`). Of turns that were asked for at once, the first
to finish counts as prefilled again.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headway.data.interfaces.rollout import Completion, EngineStats, GenerateRequest, Priority
from headway.data.types import FinishReason, TrajectoryId
from headway.events import add_prefill
from headway.planner.profiles.costs import DecodeCost


@dataclass(slots=True, eq=False)
class SharedContext:
    """A context that open calls have in common."""

    key: tuple[int, ...]
    calls: int = 0
    """Number of open calls that have the context."""
    computed_by: int | None = None
    """Version whose prefill of the context is in the cache; None while there is none."""


@dataclass(slots=True, eq=False)
class SimulatedCall:
    """One call inside the engine. ``serial`` orders the calls of a replica by submission."""

    call: GenerateRequest
    client: str
    serial: int
    length: int
    """Tokens that the whole answer will have."""
    prompt: SharedContext
    """The call's context, which other open calls may have in common with it."""
    tokens: int = 0
    """Number of whole tokens when the call last stopped decoding."""
    found: int = 0
    """Tokens of the call's context that were in the cache when it was prefilled."""
    spans: list[list[int]] = field(default_factory=list)
    started: float | None = None
    cached: bool = False
    """True while the call's context is in the KV cache."""
    segment: int = 0
    """Number of the uninterrupted stretch in a slot that the run is in; 0 while it is in none."""
    joined: float = 0.0
    """Service of the replica at which the present stretch in a slot began."""
    context: int = field(init=False)
    """Call's context and ``tokens``: what it has in the cache when it starts. Nothing decodes from an empty one."""
    training: bool = field(init=False)

    def __post_init__(self) -> None:
        self.context = len(self.call.input_ids) or 1
        self.training = self.call.priority is Priority.TRAINING

    def gain(self, tokens: int, version: int) -> None:
        """Add ``tokens`` tokens that were sampled with the weights of ``version``."""
        if tokens:
            spans = self.spans
            if not spans or spans[-1][1] != version:
                spans.append([self.tokens, version])
            self.tokens += tokens
            self.context += tokens

    def finished(self, reason: FinishReason, now: float) -> Completion:
        """Return the call as it is now, ended by ``reason``."""
        started = now if self.started is None else self.started
        return Completion(self.call.number, self.tokens, self.spans, reason, started, now, cached=self.found)


ROUNDING = 1e-6
"""Tolerance for rounding, in tokens: far above the error of a service of 10⁹, far below what a step samples."""


class ProcessorSharing:
    """Runs that decode on one replica. It has no clock: callers say how much time has passed.

    ``kv_tokens`` bounds the KV cache: before a step that would exceed it, the run that started last is preempted,
    unless it is the only one.
    """

    def __init__(self, cost: DecodeCost, kv_tokens: int | None) -> None:
        self.active = 0
        self.sampled = 0.0
        """Number of tokens sampled so far; parts of a token count until their run stops."""
        self.cost = cost
        """Cost of the steps from now on."""
        self._limit = kv_tokens
        self._service = 0.0
        self.cached = 0.0
        """Number of tokens in the KV cache."""
        self._target = 0.0
        """The service at which the next completion or preemption is due; decoding never goes beyond it."""
        self._segments = 0
        self._ends: list[tuple[float, int, int, SimulatedCall]] = []
        """Heap of (service at its end, serial, segment, run). An entry whose run left that segment is stale."""
        self._youngest: list[tuple[bool, int, int, SimulatedCall]] = []
        """Heap of (serves validation, −serial, segment, run), stale like above; kept only under a limit."""
        self._untouched: deque[tuple[float, int, list[SimulatedCall]]] = deque()
        """(service of their first token, segment, runs) of those without a token, in order."""

    # ---------------------------------------------------------------- who decodes

    def fits(self, run: SimulatedCall, beside: int, cached: int) -> bool:
        """Tell whether ``run`` can join together with ``beside`` others of ``cached`` tokens, and a step then fits."""
        active = self.active + beside
        if self._limit is None or active == 0:
            return True
        return self.cached + cached + run.context + active + 1 <= self._limit + ROUNDING

    def join(self, runs: Sequence[SimulatedCall]) -> None:
        """Have ``runs`` decode from now on."""
        self._segments += 1
        segment, service = self._segments, self._service
        for run in runs:
            run.segment, run.joined, run.cached = segment, service, True
            # Serials differ, so that the heaps never compare runs.
            heapq.heappush(self._ends, (service + run.length - run.tokens, run.serial, segment, run))
            if self._limit is not None:
                heapq.heappush(self._youngest, (not run.training, -run.serial, segment, run))
            self.cached += run.context
        self.active += len(runs)
        if untouched := [run for run in runs if run.started is None]:
            self._untouched.append((service + 1, segment, untouched))

    def leave(self, run: SimulatedCall, version: int) -> None:
        """Stop ``run``; it keeps its whole tokens, and a fraction of a token is lost."""
        service = self._service - run.joined
        # Before `_remove`, after which the run is in no stretch and has gained nothing.
        whole = self.gained(run)
        self.sampled -= service - whole
        self._remove(run, service)
        run.gain(whole, version)

    def leave_all(self, version: int) -> list[SimulatedCall]:
        """Stop all runs. Returns them in order of submission."""
        decoding = (run for _, _, segment, run in self._ends if run.segment == segment)
        # All of them first: the last one that leaves clears the heap.
        runs = sorted(decoding, key=lambda run: run.serial)
        for run in runs:
            self.leave(run, version)
        return runs

    def gained(self, run: SimulatedCall) -> int:
        """Whole tokens of the stretch that ``run`` is in."""
        return int(self._service - run.joined + ROUNDING) if run.segment else 0

    # ---------------------------------------------------------------- time

    def until_next(self) -> float:
        """Seconds to the next completion or preemption; infinite if nothing decodes."""
        if not self.active:
            return math.inf
        ends = self._ends
        while ends[0][3].segment != ends[0][2]:
            heapq.heappop(ends)
        target = ends[0][0]
        if self._limit is not None:
            # The cache may be full already, and service never goes back.
            target = max(min(target, self._full_at()), self._service)
        self._target = target
        return self.cost.seconds(self.active, self.cached, target - self._service)

    def decode(self, since: float, now: float) -> None:
        """Decode from ``since`` to ``now``, before the next event."""
        if self.active:
            steps = self.cost.steps(self.active, self.cached, now - since)
            # Not beyond the target: by rounding, a call would end before its own event.
            self._move(min(self._service + steps, self._target), since, now)

    def decode_to_next(self, since: float, now: float) -> None:
        """Decode from ``since`` to the event that `until_next` announced, which is at ``now``."""
        self._move(self._target, since, now)

    def complete(self, version: int) -> list[SimulatedCall]:
        """Remove and return the runs that have all their tokens."""
        ends, due = self._ends, self._service + ROUNDING
        completed = []
        while ends and ends[0][0] <= due:
            _, _, segment, run = heapq.heappop(ends)
            if run.segment == segment:
                tokens = run.length - run.tokens
                # Before `gain`: the cache has the context that the run joined with.
                self._remove(run, tokens)
                run.gain(tokens, version)
                completed.append(run)
        return completed

    def preempt(self, version: int) -> list[SimulatedCall]:
        """Preempt the youngest runs, one by one, until the cache has room for a step of the rest. Returns them."""
        preempted = []
        while self._limit is not None and self._full_at() <= self._service + ROUNDING:
            run = self._youngest[0][3]
            self.leave(run, version)
            run.cached = False
            preempted.append(run)
        return preempted

    # ---------------------------------------------------------------- mechanism

    def _move(self, service: float, since: float, now: float) -> None:
        untouched = self._untouched
        while untouched and untouched[0][0] <= service + ROUNDING:
            first, segment, runs = untouched.popleft()
            started = min(now, since + self.cost.seconds(self.active, self.cached, first - self._service))
            for run in runs:
                if run.segment == segment:
                    run.started = started
        gained = self.active * (service - self._service)
        self.sampled += gained
        self.cached += gained
        self._service = service

    def _remove(self, run: SimulatedCall, service: float) -> None:
        run.segment = 0
        self.active -= 1
        if self.active:
            self.cached -= run.context + service
        else:
            # Nothing refers to the service any more: begin at zero again, and rounding never adds up.
            self._service = self.cached = self._target = 0.0
            self._ends.clear()
            self._youngest.clear()
            self._untouched.clear()

    def _full_at(self) -> float:
        """Service at which the youngest run is evicted: after its last whole token before the cache is full."""
        assert self._limit is not None
        if self.active < 2:  # the last one stays, however full the cache is
            return math.inf
        youngest = self._youngest
        while youngest[0][3].segment != youngest[0][2]:
            heapq.heappop(youngest)
        joined = youngest[0][3].joined
        full = self._service + (self._limit - self.cached) / self.active
        return joined + math.floor(full - joined + ROUNDING)


class SimulatedActivity:
    """The next report of a replica, as far as it is known: busy spans, slot-time, tokens and steps since the last one.

    Decoding is continuous here, so steps come in parts: what is left of a whole step is kept for the next report. A
    prefill and the step after it are one, as in an engine that does both in one go.

    Example:
        >>> activity = SimulatedActivity()
        >>> activity.computes(1.0, True)
        >>> activity.decoded(active=2, steps=1.5, seconds=0.3, cached=10)
        >>> stats = activity.take(now=3.0)
        >>> stats.busy, stats.decode_steps  # by active sequences: whole steps, seconds, cached tokens
        ([(1.0, 3.0)], {2: (1, 0.19999999999999998, 10)})
    """

    def __init__(self) -> None:
        self.stats = EngineStats()
        self._since: float | None = None
        self._decoded: dict[int, list[float]] = {}
        """Active sequences → sums of [steps, seconds, cached tokens]; negative if a prefill took a later step."""

    def computes(self, now: float, busy: bool) -> None:
        """Note that the replica computes, or stops computing, from ``now`` on. Spans that touch become one."""
        if busy == (self._since is not None):
            return
        if not busy:
            self._close(now)
            self._since = None
        elif (spans := self.stats.busy) and spans[-1][1] == now:
            self._since = spans.pop()[0]
        else:
            self._since = now

    def decoded(self, active: int, steps: float, seconds: float, cached: float) -> None:
        """Count ``steps`` decode steps. ``cached`` tokens are cached before the first of them; each adds ``active``."""
        total = self._decoded.setdefault(active, [0.0, 0.0, 0.0])
        total[0] += steps
        total[1] += seconds
        total[2] += steps * (cached + active * (steps - 1) / 2)

    def prefilled(self, active: int, tokens: int, prefill_s: float, step_s: float, cached: float) -> None:
        """Count a prefill of ``tokens`` that ended. The step that follows belongs to it; `decoded` will count that."""
        self.stats.prefilled_tokens += tokens
        add_prefill(self.stats.prefill_steps, active, tokens, prefill_s + step_s, round(cached))
        self.decoded(active, -1.0, -step_s, cached + active)  # the last term: a step back from there

    def take(self, now: float) -> EngineStats:
        """Return what was computed up to ``now``, with the whole steps, and begin the next report."""
        if self._since is not None:
            self._close(now)
            self._since = now
        stats, self.stats = self.stats, EngineStats()
        for active, total in self._decoded.items():
            steps = int(total[0] + ROUNDING)
            if steps > 0:
                share = steps / total[0]
                stats.decode_steps[active] = (steps, total[1] * share, round(total[2] * share))
                total[:] = [value * (1 - share) for value in total]
        return stats

    def _close(self, now: float) -> None:
        if self._since is not None and now > self._since:
            self.stats.busy.append((self._since, now))


@dataclass(slots=True)
class _LastCall:
    """The context and continuation of an episode's last call."""

    client: str
    tokens: int
    computed_by: int


class SimulatedPrefixCache:
    """The contexts of open calls, and what is kept for further calls of episodes. What one version computed is nothing
    to another one, unless the episode goes on in place (`go_on_in_place`).

    Kept tokens take what decoding leaves of the memory: those that were used least recently go first (`fit`).
    """

    def __init__(self) -> None:
        self._contexts: dict[tuple[int, ...], SharedContext] = {}
        self._kept: dict[TrajectoryId, _LastCall] = {}
        """By episode, the least recently used one first."""
        self._kept_tokens = 0

    def open(self, call: GenerateRequest) -> SharedContext:
        """The context of ``call``, which is open from now on."""
        length = len(call.input_ids)
        key = (*call.trajectory, call.key, length) if call.key else (*call.trajectory[:3], length)
        if (context := self._contexts.get(key)) is None:
            context = self._contexts[key] = SharedContext(key)
        context.calls += 1
        return context

    def close(self, run: SimulatedCall) -> None:
        """Count the run's call as open no more; a context without open calls is forgotten."""
        context = run.prompt
        context.calls -= 1
        if not context.calls:
            del self._contexts[context.key]

    def prefill(self, run: SimulatedCall, version: int) -> int:
        """Compute the context of ``run`` under ``version``: tokens that this takes, beside ``run.found``.

        A call that goes on with tokens of its own is prefilled whole.
        """
        if run.tokens:
            return run.context
        # Before the prompt counts as computed: whoever shares it finds it from here on, also who starts with this one.
        run.found = run.context if run.prompt.computed_by == version else self._found(run, version)
        run.prompt.computed_by = version
        return run.context - run.found

    def _found(self, run: SimulatedCall, version: int) -> int:
        kept = self._kept.pop(run.call.trajectory, None)
        if kept is None:
            return 0
        # Put back behind all others: it is the one that was used last.
        self._kept[run.call.trajectory] = kept
        if kept.computed_by != version:
            return 0
        ids = run.call.input_ids
        known = int(ids[0]) if run.call.key and len(ids) else 0
        return min(kept.tokens, run.context, known or run.context)

    # ------------------------------------------------------------------------------------- between calls

    def keep(self, run: SimulatedCall, version: int) -> None:
        """Keep all tokens of a finished ``run`` for its episode's next call under ``version``."""
        self._forget(run.call.trajectory)
        self._kept[run.call.trajectory] = _LastCall(run.client, run.context, version)
        self._kept_tokens += run.context

    def go_on_in_place(self, version: int) -> None:
        """Keep what the previous version computed for episodes, for use under ``version``."""
        for kept in self._kept.values():
            kept.computed_by = version

    def fit(self, room: float) -> None:
        """Give up what is kept beyond ``room`` tokens."""
        while self._kept and self._kept_tokens > room:
            self._forget(next(iter(self._kept)))

    def release(self, episodes: Iterable[TrajectoryId]) -> None:
        """Give up what is kept for ``episodes``."""
        for episode in episodes:
            self._forget(episode)

    def leave(self, client: str) -> None:
        """Give up what is kept for all episodes of ``client``."""
        self.release([episode for episode, kept in self._kept.items() if kept.client == client])

    def clear(self) -> None:
        """Drop everything that was computed."""
        self._kept.clear()
        self._kept_tokens = 0
        for context in self._contexts.values():
            context.computed_by = None

    def _forget(self, episode: TrajectoryId) -> None:
        if (kept := self._kept.pop(episode, None)) is not None:
            self._kept_tokens -= kept.tokens
