"""Random runs: small ones, over everything that a configuration, the machines and chance can do to the pipeline.

Durations and moments are multiples of `TICK`, so that times on the virtual clock are exact and coincide often: two
things that happen at the same instant are where orders matter.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from typing import Any, NamedTuple, TypeVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.data.types import Prompt
from headway.errors import UpdateFailed, WorkerDied
from headway.planner.profiles.job_profile import PhaseProfile, UpdateProfile
from tests.pipeline.fake_policies import FakeReference
from tests.pipeline.fakes import FakeReward, fails, seeded_lengths
from tests.pipeline.scenario import Run, Scenario

T = TypeVar("T")

TICK = 1 / 64
"""Seconds. Every time in these runs is a multiple of it."""
MOST_GROUPS = 40
"""That a run trains."""

SCHEDULES = {
    "undisturbed": 700,
    "on-policy": 60,
    "admission": 100,
    "overlapped": 150,
    "max_lag": 150,
    "stopped": 200,
    "deaths": 300,
    "joins": 200,
    "episode_workers": 200,
    "everything": 300,
    "hangs": 100,
    "silence": 200,
    "one buffer": 150,
    "cancelled": 200,
}
"""Random runs that the test of that name makes, at the least; a share of them in the quick tests."""

SHAPES = [(1, 1, 1), (1, 1, 3), (2, 1, 2), (1, 2, 2), (4, 1, 1), (3, 1, 2), (2, 2, 2), (1, 1, 8), (5, 1, 2), (3, 1, 3)]
"""Fetches per version, mini-batches per batch, groups per mini-batch."""
ETAS = [
    Fraction(eta)
    for eta in ["0", "0", "0", "0.1", "0.25", "0.3", "1/3", "0.5", "0.5", "2/3", "1", "1", "4/3", "1.5", "2", "3"]
]
"""Fractions for which ⌊·⌋ is unforgiving among them: 3/10 of B = 10, 4/3 of B = 9."""

FAR_AHEAD = [Fraction(eta) for eta in (2, 2, 3, 3, 3)]
"""Only with η ≥ 2 can a third version be there before a replica has the first, so that the second is left out."""


class Fault(NamedTuple):
    """``what`` happens to replica number ``replica``, or to an episode worker; a stop happens to all."""

    at: float
    """Seconds; or, negative, minus the number of events after which it happens at once."""
    what: str
    """``dies``, ``episode worker dies``, ``joins``, ``stop``, ``loses a runner``, or what `FakeRollout` can be told:
    ``hangs``, ``hangs_on_drain``, ``never_receives``, ``receives corrupted``, ``silent on …``."""
    replica: int = 0

    def happen(self, run: Run) -> None:
        victim = run.rollouts[self.replica % len(run.rollouts)]
        match self.what:
            case "dies":
                victim.die(WorkerDied(f"{victim.name} was killed"))
            case "hangs":
                victim.hangs = True
            case "hangs_on_drain":
                victim.hangs_on_drain = True
            case "never_receives":
                victim.never_receives = True
            case "receives corrupted":
                victim.fails_to_receive.append(UpdateFailed(f"what {victim.name} received is corrupted"))
            case what if what.startswith("silent on "):
                victim.silent_on.add(what.removeprefix("silent on "))
            case "episode worker dies":
                living = [worker for worker in run.episode_workers if not worker.is_dead]
                if living:
                    living[self.replica % len(living)].die()
            case "joins":
                run.join(f"late-{len(run.rollouts)}")
            case "stop":
                run.request_stop()
            case "loses a runner":
                assert run.hosting is not None
                run.hosting.programs.lose_worker(self.replica)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Case:
    """One small run. Everything random in it is drawn from ``seed``, keyed by what it belongs to."""

    seed: int
    shared: bool
    overlapped: bool
    eta: Fraction
    fetches_per_version: int
    require_batches: int
    mini_batch: int
    ppo_epochs: int
    versions: int
    by_epochs: bool
    short_by: int
    """Rows that the data lacks to a whole number of versions."""
    admission: str
    order: str
    window: int | str
    on_update: str
    max_lag: int | None
    on_overdue: str
    replicas: int
    slots: int
    kv_tokens: int | None
    prefill_s: float
    prefill_token_s: float
    recv_s: float
    load_s: float
    n: int
    problems: int
    test_freq: int
    save_freq: int
    failing: float
    flat: float
    """Shares of prompts whose reward fails, or has no variance."""
    nonfinite: float
    step_s: float
    reward_s: float
    longest: int
    reference: str
    use_rollout_log_probs: bool
    faults: tuple[Fault, ...] = ()
    double_buffered: bool = True
    update_timeout_s: float = 1000.0
    stall_timeout_s: float = 100.0
    episode_workers: int = 1

    @property
    def replica_start_s(self) -> float | None:
        return None if self.shared else (None, 0.0, 2.0)[self.seed % 3]

    @property
    def per_version(self) -> int:
        return self.fetches_per_version * self.require_batches * self.mini_batch

    def scenario(self) -> Scenario:
        groups = self.versions * self.per_version
        length: dict[str, Any] = {"total": groups}
        if self.by_epochs:
            length = {"rows": max(1, groups - self.short_by), "epochs": 1}
        return Scenario(
            "async_partial",
            async_training={
                "trigger_parameter_sync_step": self.fetches_per_version,
                "require_batches": self.require_batches,
                "staleness_threshold": str(self.eta),
                "admission": self.admission,
                "order": self.order,
                "window": self.window if self.order == "window" else None,
                "on_update": self.on_update,
                "max_lag": self.max_lag,
                "on_overdue": self.on_overdue,
                "use_rollout_log_probs": self.use_rollout_log_probs,
            },
            sections={
                "run": {"seed": self.seed, "stop_timeout_s": 1e6},
                "param_update": {
                    "schedule": "overlapped" if self.overlapped else "synchronous",
                    "timeout_s": self.update_timeout_s,
                },
                "actor": {"ppo_epochs": self.ppo_epochs},
                "trainer": {"save_freq": self.save_freq},
                "cluster": {
                    "stall_timeout_s": self.stall_timeout_s,
                    "placement": "shared" if self.shared else "split",
                },
            },
            mini_batch=self.mini_batch,
            n=self.n,
            replicas=self.replicas,
            episode_workers=self.episode_workers,
            replica_start_s=self.replica_start_s,
            slots=self.slots,
            seed=self.seed,
            lengths=seeded_lengths(self.seed, 1, self.longest),
            problems=self.problems,
            test_freq=self.test_freq,
            reward=FakeReward(self.rewards, lambda prompt: self._ticks(self.reward_s, "reward_s", prompt.row)),
            filters=self.n > 1,
            trainer={
                "step_s": lambda step: self._ticks(2 * self.step_s, "step", step),
                "skips": lambda step: self._draw("nonfinite", step) < self.nonfinite,
            },
            engine={
                "kv_tokens": self.kv_tokens,
                "prefill_s": self.prefill_s,
                "prefill_token_s": self.prefill_token_s,
                "load_s": self.load_s,
                "double_buffered": self.double_buffered,
            },
            update=UpdateProfile(gather=PhaseProfile(latency_s=0.25), recv=PhaseProfile(latency_s=self.recv_s)),
            reference=FakeReference() if self.reference == "own ranks" else None,
            reference_on_trainer_ranks=self.reference == "inside the batch",
            script=self._arrange if self.faults else None,
            **length,
        )

    def rewards(self, prompt: Prompt) -> list[float]:
        """Of the prompt's answers; raises where it fails."""
        luck = self._draw("luck", prompt.epoch, prompt.row)
        if luck < self.failing:
            return list(fails("unlucky"))
        return [1.0] if luck < self.failing + self.flat else [float(k) for k in range(self.n)]

    def _arrange(self, run: Run) -> None:
        """Faults happen between two turns of the loop, as they do outside."""
        loop = asyncio.get_running_loop()
        after: dict[int, list[Fault]] = {}
        for fault in self.faults:
            if fault.at < 0:
                after.setdefault(int(-fault.at), []).append(fault)
            else:
                loop.call_at(fault.at, fault.happen, run)

        def count(_: object) -> None:
            for fault in after.get(len(run.events), []):
                loop.call_soon(fault.happen, run)

        run.recorder.on = count

    def _draw(self, *key: object) -> float:
        return random.Random(f"{self.seed} {key}").random()

    def _ticks(self, longest: float, *key: object) -> float:
        return floor(longest / TICK * self._draw(*key)) * TICK


moments = st.one_of(
    st.integers(0, 64 * 10).map(lambda ticks: ticks * TICK),
    st.integers(0, 40).map(float),
    st.integers(1, 400).map(lambda events: -float(events)),
)
"""Of a fault. At whole seconds much else happens, too; after an event, what follows from it is under way."""


@st.composite
def cases(draw: st.DrawFn, /, **fixed: Any) -> Case:
    """``fixed`` gives fields of `Case` that are not drawn; what depends on them follows."""

    def pick(name: str, values: list[Any]) -> Any:
        return fixed[name] if name in fixed else draw(st.sampled_from(values))

    def between(name: str, low: int, high: int) -> Any:
        return fixed[name] if name in fixed else draw(st.integers(low, high))

    shape = fixed.get("shape") or draw(st.sampled_from(SHAPES))
    b = shape[0] * shape[1] * shape[2]
    machines = draw(st.sampled_from([(False, False), (False, True), (True, False)]))
    shared, overlapped = fixed.get("shared", machines[0]), fixed.get("overlapped", machines[1])
    eta = pick("eta", [*ETAS, *FAR_AHEAD] if overlapped else ETAS)
    order = pick("order", ["fifo", "window", "ready"])
    least = floor(1 + eta - Fraction(1, b))
    """Below it `wait` may come to a state in which no group may be taken."""
    on_overdue = pick("on_overdue", ["wait", "drop"])
    lags = [None, least, least + 1] if on_overdue == "wait" else [None, 0, 1, least]
    failing, flat = pick("discards", [(0.0, 0.0), (0.2, 0.0), (0.1, 0.3)])
    return Case(
        seed=between("seed", 0, 10_000),
        shared=shared,
        overlapped=overlapped,
        eta=eta,
        fetches_per_version=shape[0],
        require_batches=shape[1],
        mini_batch=shape[2],
        ppo_epochs=pick("ppo_epochs", [1, 1, 2]),
        versions=between("versions", 1, max(1, min(8, (MOST_GROUPS - 8) // b))),
        by_epochs=pick("by_epochs", [False, False, True]),
        short_by=between("short_by", 0, b),
        admission=pick("admission", ["group", "batch"]),
        order=order,
        window=pick("window", ["B", 1, 2, b, b + 1, 2 * b]),
        on_update=pick("on_update", ["drain", "interrupt"] if shared else ["drain", "interrupt", "keep"]),
        max_lag=pick("max_lag", lags if order == "ready" else [None]),
        on_overdue=on_overdue,
        replicas=between("replicas", 1, 4),
        slots=between("slots", 1, 8),
        kv_tokens=pick("kv_tokens", [None, None, 40, 150]),
        prefill_s=pick("prefill_s", [0.0, 0.0, 0.125]),
        prefill_token_s=pick("prefill_token_s", [0.0, TICK]),
        recv_s=pick("recv_s", [0.25, 0.25, 0.0, 8.0] if overlapped else [0.25, 0.25, 0.0, 2.0]),
        load_s=pick("load_s", [0.125, 0.125, 0.0, 2.0]),
        n=between("n", 1, 3),
        problems=pick("problems", [0, 0, 1, 4]),
        test_freq=pick("test_freq", [1, 2, 3, -1]),
        save_freq=pick("save_freq", [-1, 1, 2]),
        failing=failing,
        flat=flat,
        nonfinite=pick("nonfinite", [0.0, 0.0, 0.2]),
        step_s=pick("step_s", [0.0, 0.5, 4.0]),
        reward_s=pick("reward_s", [0.0, 1.0, 10.0]),
        longest=pick("longest", [1, 20, 20, 120]),
        reference=pick("reference", ["none", "none", "own ranks", "inside the batch"]),
        use_rollout_log_probs=pick("use_rollout_log_probs", [True, False]),
        faults=fixed.get("faults", ()),
        double_buffered=fixed.get("double_buffered", True),
        update_timeout_s=fixed.get("update_timeout_s", 1000.0),
        stall_timeout_s=fixed.get("stall_timeout_s", 100.0),
        episode_workers=fixed.get("episode_workers", 1),
    )


@st.composite
def faulty(draw: st.DrawFn, /, *whats: str, most: int = 3, **fixed: Any) -> Case:
    """Cases in which up to ``most`` things happen at random moments, of the kinds in ``whats``."""
    fault = st.builds(Fault, moments, st.sampled_from(whats), st.integers(0, 4))
    faults = draw(st.lists(fault, min_size=1, max_size=most))
    shared = "joins" not in {fault.what for fault in faults} and draw(st.booleans())
    overlapped = not shared and draw(st.booleans())
    if "episode worker dies" in whats:
        fixed["episode_workers"] = draw(st.integers(1, 3))
    return draw(cases(**{"shared": shared, "overlapped": overlapped, **fixed, "faults": tuple(faults)}))


def for_each(strategy: st.SearchStrategy[T], schedules: float, check: Callable[[T], object]) -> None:
    """Check that many random cases, always the same ones; a smaller number is the beginning of a larger one."""
    seen, schedules = 0, ceil(schedules)

    @settings(max_examples=schedules, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def each(case: T) -> None:
        nonlocal seen
        seen += 1
        check(case)

    each()
    assert seen >= schedules
