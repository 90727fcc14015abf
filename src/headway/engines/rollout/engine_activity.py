"""Activity of an engine, the source of idle ratios, slot utilisation and step times.

`NativeActivity` times each step of the native engine; `VllmActivity` uses vLLM's report after each of its steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from headway.data.interfaces.rollout import EngineStats
from headway.events import Span, add_prefill


class Counts(ABC):
    """Busy spans, tokens and steps since the last `take`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._stats = EngineStats()

    def take(self, running: int, waiting: int, version: int) -> EngineStats:
        """Return all activity since the last call."""
        self.stop()
        stats, self._stats = self._stats, EngineStats()
        stats.running, stats.waiting, stats.version = running, waiting, version
        return stats

    @abstractmethod
    def stop(self) -> None:
        """Bring spans and slot time up to date; later activity begins a new span."""

    def _count(self, *, active: int, prefilled: int, seconds: float, cached: int) -> None:
        """Count one step. For the arguments see `PrefillSteps`."""
        self._stats.prefilled_tokens += prefilled
        if prefilled:
            add_prefill(self._stats.prefill_steps, active, prefilled, seconds, cached)
        else:
            steps, total, before = self._stats.decode_steps.get(active, (0, 0.0, 0))
            self._stats.decode_steps[active] = (steps + 1, total + seconds, before + cached)


@dataclass(slots=True)
class DecodeStep:
    """Record of one step, filled in while it runs."""

    active: int = 0
    """Number of rows that were given a token."""
    prefilled: int = 0
    """Number of prefilled tokens."""
    found: int = 0
    """Number of context tokens that needed no prefill: from the prefix cache, or prefilled once for several calls."""
    cached: int = 0
    """Number of tokens in the KV cache."""
    preempted: int = 0
    """Number of rows that were parked before the step because memory ran short."""


class NativeActivity(Counts):
    """Measures the native engine's steps, each timed as it runs."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._start = 0.0
        """Time up to which the slots' time is counted."""
        self._open: Span | None = None

    def begin(self) -> None:
        """Note that a step begins. Consecutive steps without a `stop` in between count as one busy span."""
        self._start = self.clock()
        self._open = self._open or (self._start, self._start)

    def end(self, step: DecodeStep) -> None:
        """Note that ``step``, which began at the end of the step before, has produced its tokens."""
        end = self.clock()
        opened, before = self._open or (self._start, self._start)
        self._open = (opened, end)
        self._stats.slot_seconds += step.active * (end - self._start)
        self._start = end
        self._stats.generated_tokens += step.active
        self._stats.cached_tokens += step.found
        self._stats.preempted += step.preempted
        self._count(active=step.active, prefilled=step.prefilled, seconds=end - before, cached=step.cached)

    def stop(self) -> None:
        """End the busy span: the engine computes nothing until its next step."""
        if self._open:
            self._stats.busy.append(self._open)
            self._open = None


class VllmActivity(Counts):
    """Activity of vLLM, which makes steps while it has calls and is not paused, and reports after each step.

    Prefilled tokens are all tokens of a step except one for each call that had a token before: also for an interrupted
    call, whose context is computed again but for what the prefix cache has.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._since: float | None = None
        """Start time of the open span; None while nothing computes."""
        self._counted = 0.0
        """Time up to which the slots' time in the open span is counted."""
        self._last = 0.0
        """End time of the last step, or the time at which computing resumed if that is later."""
        self._goes_on = False
        """True once a step was recorded since computing last began."""
        self._running = 0
        self._cached = 0
        """Number of tokens of all calls that have a token, including their prompts."""
        self._inside = 0
        """Number of trajectories in vLLM's KV cache at its last step."""
        self._cut = 0
        """Number of trajectories whose cache was cleared on request and that vLLM has not yet reported as preempted."""

    def running(self, calls: int, *, halted: bool = False) -> None:
        """Set the number of calls that vLLM has from now on; it computes them unless ``halted``."""
        now = self.clock()
        self._count_slots(now)
        self._cut = min(self._cut, calls)  # vLLM reports no preemption of calls that were aborted before they resumed
        if halted:
            calls = 0
        self._running = calls
        if calls and self._since is None:
            self._since = self._last = now
            self._goes_on = False
        elif not calls and self._since is not None:
            self._stats.busy.append((self._since, now))
            self._since = None

    def interrupted(self) -> None:
        """Note that the cache of all calls was cleared on request; vLLM will report that as preemptions."""
        self._cut += self._inside
        self._inside = 0

    def step(self, scheduler: Any, iteration: Any) -> None:
        """Record a step of vLLM from its ``SchedulerStats`` and ``IterationStats``, either of which may be None.

        A step lasts from the end of the step before to its own end, by vLLM's clock, if a call got tokens in both.
        Otherwise, or if the engine was halted in between (vLLM's times would include the halt), it ends now.
        """
        details = getattr(scheduler, "iteration_details", None)
        active, latencies = 0, []
        if scheduler is not None:
            self._inside = scheduler.num_running_reqs
        if iteration is not None:
            self._stats.generated_tokens += iteration.num_generation_tokens
            ordered = min(self._cut, iteration.num_preempted_reqs)
            self._cut -= ordered
            self._stats.preempted += iteration.num_preempted_reqs - ordered
            self._stats.cached_tokens += iteration.prompt_token_stats.cached_tokens
            self._cached += iteration.num_generation_tokens + iteration.prompt_token_stats.total
            latencies = iteration.inter_token_latencies_iter
            active = len(latencies) + len(iteration.time_to_first_tokens_iter)
        if details is None:
            self._stats.prefilled_tokens += 0 if iteration is None else iteration.prompt_token_stats.computed
            return
        now = self.clock()
        seconds = min(latencies) if latencies and self._goes_on else now - self._last
        self._last, self._goes_on = now, True
        prefilled = details.num_ctx_tokens + details.num_generation_tokens - details.num_generation_requests
        if active or prefilled:  # else all calls of the step have been aborted meanwhile
            # The KV cache does not have the last token of each call yet.
            self._count(active=active, prefilled=prefilled, seconds=seconds, cached=self._cached - active)

    def ended(self, tokens: int) -> None:
        """Note that a call ended with ``tokens`` tokens, including its prompt; 0 if it never got a token."""
        self._cached -= tokens

    def stat_logger(self, *_: Any) -> Any:
        """Make the stat logger that vLLM calls after each step."""

        def record(scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            self.step(scheduler_stats, iteration_stats)

        def nothing(*_: Any, **__: Any) -> None: ...

        others = dict.fromkeys(("log", "log_engine_initialized", "record_sleep_state"), nothing)
        return SimpleNamespace(record=record, **others)

    def stop(self) -> None:
        now = self.clock()
        self._count_slots(now)
        if self._since is not None:
            self._stats.busy.append((self._since, now))
            self._since = now

    def _count_slots(self, now: float) -> None:
        if self._running:
            self._stats.slot_seconds += self._running * (now - self._counted)
        self._counted = now
