"""Everything that docs/staleness-proofs.md proves, by exhaustion, and its worked examples against the pipeline itself.

The first part asks for the worst that an adversary can do (see adversary.py), for every theorem. The second runs the
pipeline on the virtual clock and compares each table of the document with what happened;
``python -m tests.pipeline.test_bound`` prints the tables.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from math import floor
from pathlib import Path
from typing import Any

import pytest

from headway.data.types import Prompt
from headway.events import BatchTaken, GroupAdmitted, GroupSettled, RunStarted
from headway.pipeline.admission.staleness import admission_limit, lag_bound
from tests.pipeline.adversary import Live, State, World, exceeds, reachable, worst
from tests.pipeline.fakes import FakeReward
from tests.pipeline.scenario import Run, Scenario
from tests.tiers import mostly_slow

HALF = Fraction(1, 2)
B = 4
"""In runs of the pipeline."""

# ---------------------------------------------------------------------------------------------- the bound

SMALL = [
    (1, Fraction(1), 1, 2),
    (1, Fraction(1), 3, 2),
    (1, Fraction(3, 2), 2, 2),
    (1, Fraction(2), 1, 2),
    (2, HALF, 1, 2),
    (2, HALF, 2, 2),
    (2, HALF, 3, 2),
    (2, Fraction(1), 1, 2),
    (2, Fraction(1), 2, 1),
    (2, Fraction(3, 2), 1, 1),
    (3, Fraction(1, 3), 1, 2),
    (3, Fraction(1, 3), 3, 1),
    (3, Fraction(2, 3), 2, 1),
]
every_small_world = mostly_slow(("b", "eta", "window", "replicas"), SMALL, quick=[*SMALL[:9], *SMALL[10:12]])


@every_small_world
def test_the_bound_holds_in_every_reachable_state_and_is_reached(b: int, eta: Fraction, window: int, replicas: int):
    assert worst(World(b, eta, window, replicas)).lag == lag_bound(eta, b, window)


@every_small_world
def test_a_trainer_that_waits_for_every_load_reaches_the_same_bound(b: int, eta: Fraction, window: int, replicas: int):
    assert worst(World(b, eta, window, synchronous=True)).lag == lag_bound(eta, b, window)


@every_small_world
def test_replicas_are_never_further_apart_than_one_plus_eta(b: int, eta: Fraction, window: int, replicas: int):
    assert worst(World(b, eta, window, replicas)).apart == (floor(1 + eta) if replicas > 1 else 0)


@every_small_world
def test_never_more_than_one_plus_eta_versions_of_groups_are_not_consumed(
    b: int, eta: Fraction, window: int, replicas: int
):
    assert worst(World(b, eta, window, replicas)).unconsumed == floor((1 + eta) * b)


@every_small_world
def test_a_group_is_admitted_at_most_as_far_behind_as_fifo_lets_it_fall(
    b: int, eta: Fraction, window: int, replicas: int
):
    """With a smaller ``max_lag``, ``drop`` would admit groups that are overdue already."""
    assert worst(World(b, eta, window, replicas)).behind == lag_bound(eta, b, 1)


@pytest.mark.parametrize("window", [1, 2, 3, None])
@pytest.mark.parametrize("b", [1, 2, 3])
def test_without_a_group_ahead_every_order_has_lag_0(b: int, window: int | None):
    """η = 0, and every η with ⌊η·B⌋ = 0: then nothing may be admitted beyond what the served version trains."""
    assert worst(World(b, Fraction(0), window, replicas=2)).lag == 0
    assert worst(World(b, Fraction(1, b + 1), window, replicas=2)).lag == 0


@pytest.mark.parametrize("b", [1, 2])
def test_completion_order_has_no_bound_when_a_group_may_be_ahead(b: int):
    """One group is overtaken for ever: it grows older with every version, and this search would never end."""
    assert exceeds(World(b, Fraction(1), None), lag=9)


def test_a_replica_that_joins_below_the_served_version_breaks_the_bound():
    """What the proof needs of late replicas: no group gets a token older than the version under which it came in."""
    bound = lag_bound(Fraction(1), 1, 1)
    assert bound is not None
    assert exceeds(World(1, Fraction(1), 1, replicas=2, joins_below=True), bound)


# ---------------------------------------------------------------------------------------------- max_lag, wait


def due(world: World, state: State, versions: int) -> list[Live]:
    """Live groups that are overdue unless they are taken within this version and the next ``versions``."""
    assert world.max_lag is not None
    return [group for group in state.live if group.age + versions >= world.max_lag]


def next_version_only(world: World, state: State, group: Live) -> bool:
    """If the next version would make groups overdue, one of these."""
    urgent = due(world, state, 0)
    return not urgent or group in urgent


def looking_ahead(world: World, state: State, group: Live) -> bool:
    """Whatever is due by any coming version still fits after this group is taken."""
    assert world.max_lag is not None
    for versions in range(world.max_lag + 1):
        urgent = due(world, state, versions)
        places = (versions + 1) * world.b - state.taken
        if len(urgent) - (group in urgent) > places - 1:
            return False
    return True


def threshold(b: int, eta: Fraction) -> int:
    return floor(1 + eta - Fraction(1, b))


def blocked(world: World, state: State) -> bool:
    """The batch waits, and whoever finishes may not be taken."""
    return bool(state.live) and not any(world.may_take(state, group) for group in state.live)


AT_MOST_B_AHEAD = [(1, Fraction(1)), (2, HALF), (2, Fraction(1)), (3, Fraction(1, 3)), (3, Fraction(2, 3))]
MORE_AHEAD = [(1, Fraction(2)), (1, Fraction(3)), (2, Fraction(3, 2))]


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize(("b", "eta"), AT_MOST_B_AHEAD + MORE_AHEAD)
def test_wait_looking_ahead_keeps_max_lag_and_never_blocks(b: int, eta: Fraction, more: int):
    max_lag = threshold(b, eta) + more
    world = World(b, eta, None, replicas=2 if eta <= 1 else 1, max_lag=max_lag, in_time=looking_ahead)
    for state in reachable(world):
        assert state.oldest <= max_lag
        assert not blocked(world, state)


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize(("b", "eta"), AT_MOST_B_AHEAD)
def test_with_at_most_b_groups_ahead_the_next_version_is_far_enough(b: int, eta: Fraction, more: int):
    max_lag = threshold(b, eta) + more
    world = World(b, eta, None, replicas=2, max_lag=max_lag, in_time=next_version_only)
    for state in reachable(world):
        assert state.oldest <= max_lag
        assert len(due(world, state, 0)) <= b - state.taken


@pytest.mark.parametrize("more", [0, 1, 2])
@pytest.mark.parametrize(("b", "eta"), MORE_AHEAD)
def test_with_more_groups_ahead_looking_at_the_next_version_alone_is_too_late(b: int, eta: Fraction, more: int):
    """More than B groups of one version are overtaken, until one version makes all of them due; whatever max_lag is."""
    max_lag = threshold(b, eta) + more
    assert exceeds(World(b, eta, None, max_lag=max_lag, in_time=next_version_only), max_lag)


@pytest.mark.parametrize(("b", "eta"), AT_MOST_B_AHEAD + MORE_AHEAD)
def test_wait_can_block_below_its_threshold(b: int, eta: Fraction):
    world = World(b, eta, None, max_lag=threshold(b, eta) - 1, in_time=looking_ahead)
    assert any(blocked(world, state) for state in reachable(world))


@mostly_slow(
    ("eta", "more"),
    product([Fraction(1, 4), HALF, Fraction(1), Fraction(2), Fraction(3)], [0, 1]),
    quick=[(Fraction(1, 4), 0), (HALF, 1), (Fraction(1), 0), (Fraction(3), 1)],
)
def test_the_pipeline_keeps_max_lag_by_waiting(eta: Fraction, more: int):
    """Everything that is ahead under version 0 is scored so late that all younger groups could overtake it."""
    ahead = range(B, admission_limit(0, eta, B))
    settings = {
        "trigger_parameter_sync_step": 1,
        "staleness_threshold": eta,
        "order": "ready",
        "max_lag": threshold(B, eta) + more,
        "on_overdue": "wait",
    }
    reward = FakeReward(seconds=lambda prompt: 100.0 if prompt.row in ahead else 0.25)
    run = Scenario("async_partial", async_training=settings, slots=64, total=12 * B, reward=reward).run()
    run.assert_completed()
    lags = [event.lag for event in run.of(GroupSettled) if event.lag is not None]
    assert max(lags) <= threshold(B, eta) + more


# ---------------------------------------------------------------------------------------------- worked examples

DOCUMENT = Path(__file__).parents[2] / "docs" / "staleness-proofs.md"
VERSIONS = 5
"""Rows of a table; the run goes on after it, so that its end does not show."""


@dataclass(frozen=True, slots=True)
class Example:
    """A run with B = 4 in which generation is the faster half, so that the limit is always reached."""

    title: str
    """Of the document's section that has the table."""
    eta: float
    window: int = 1
    slow: dict[int, float] = field(default_factory=dict)
    """Row of the data set → seconds until it is rewarded; others take a quarter."""
    filtered: frozenset[int] = frozenset()

    def run(self) -> Run:
        settings: dict[str, Any] = {
            "trigger_parameter_sync_step": 1,
            "staleness_threshold": self.eta,
            "order": "window",
            "window": self.window,
        }
        scenario = Scenario(
            "async_partial",
            async_training=settings,
            mini_batch=B,
            total=(VERSIONS + 4) * B,
            slots=64,
            lengths=lambda _: 16,
            reward=FakeReward(rewards=self._rewards, seconds=lambda prompt: self.slow.get(prompt.row, 0.25)),
            filters=True,
            trainer={"step_s": lambda _: 8.0},
        )
        return scenario.run().assert_completed()

    def _rewards(self, prompt: Prompt) -> list[float]:
        return [0.0, 0.0] if prompt.row in self.filtered else [0.0, 1.0]

    def table(self) -> list[list[str]]:
        """One row per version: its limit, the groups admitted while it was the served one, those trained at it."""
        run = self.run()
        admissions, settled = run.of(GroupAdmitted), {event.number: event for event in run.of(GroupSettled)}
        rows = []
        for version in range(VERSIONS):
            under = [event for event in admissions if event.version == version]
            trained = [number for fetch in run.of(BatchTaken) if fetch.version == version for number in fetch.numbers]
            gone = {event.number for event in under if settled[event.number].fate == "filtered"}
            rows.append(
                [
                    str(version),
                    str(under[0].limit),
                    _spans([event.number for event in under], crossed_out=gone),
                    ", ".join(f"{number} ({settled[number].lag})" for number in trained),
                ]
            )
        return rows


EXAMPLES = [
    Example("η = 0", eta=0),
    Example("η = 0.5", eta=0.5),
    Example("η = 1", eta=1),
    Example("η = 2", eta=2),
    Example("η = 0.5 with discards", eta=0.5, filtered=frozenset({1, 7})),
    Example("η = 0.5 with a window of B and one slow group", eta=0.5, window=B, slow={5: 25.0}),
]
HEADER = ["version", "limit", "admitted while it is served", "trained at it: group (lag)"]


def _spans(numbers: list[int], crossed_out: set[int]) -> str:
    """``0–3, ~~4~~, 5``: consecutive numbers together, those crossed out alone."""
    spans: list[list[int]] = []
    for number in numbers:
        joins = spans and spans[-1][-1] == number - 1 and not {number, number - 1} & crossed_out
        if joins:
            spans[-1].append(number)
        else:
            spans.append([number])
    names = [str(span[0]) if len(span) == 1 else f"{span[0]}–{span[-1]}" for span in spans]
    return ", ".join(f"~~{name}~~" if span[0] in crossed_out else name for name, span in zip(names, spans, strict=True))


def markdown(rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [HEADER, ["---"] * len(HEADER), *rows])


def section(title: str) -> str:
    """The document's text under a heading of the third level."""
    _, found, rest = DOCUMENT.read_text(encoding="utf-8").partition(f"\n### {title}\n")
    assert found, f"{DOCUMENT.name} has no section '### {title}'"
    return rest.partition("\n#")[0]


@mostly_slow("example", EXAMPLES, quick=[EXAMPLES[0], EXAMPLES[4]])
def test_the_worked_examples_are_what_the_pipeline_does(example: Example):
    assert markdown(example.table()) in section(example.title)


@mostly_slow("example", EXAMPLES, quick=[EXAMPLES[1], EXAMPLES[3]])
def test_the_worked_examples_name_their_bound(example: Example):
    run = example.run()
    bound = run.of(RunStarted)[0].lag_bound
    assert re.search(rf"^Bound: (.+ = )?{bound}\.$", section(example.title), re.MULTILINE)
    lags = [event.lag for event in run.of(GroupSettled) if event.lag is not None]
    assert max(lags) == bound


if __name__ == "__main__":
    for example in EXAMPLES:
        print(f"### {example.title}\n\n{markdown(example.table())}\n")
