"""The journal of runs that are killed and resumed, on the virtual clock: what it keeps, torn or of another run."""

from __future__ import annotations

import json
import os
import random
import shutil
from contextlib import suppress
from dataclasses import replace
from math import floor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from headway.data.interfaces.episode_groups import Group, Scores
from headway.data.interfaces.rollout import SamplingParams
from headway.data.journal import segments
from headway.data.types import Conversation, FinishReason, Trajectory
from headway.events import BatchTaken, CheckpointSaved, EpisodeWorkerLost, GroupSettled, Note, VersionReached
from headway.pipeline.admission.ledger import Fate
from headway.pipeline.admission.run_journal import RunJournal, settings_of
from headway.planner.simulation.virtual_clock import run_virtual
from tests.pipeline.cases import TICK, Case, cases, for_each
from tests.pipeline.fakes import FakeSource
from tests.pipeline.kills import check_history, run_with_kills
from tests.pipeline.scenario import Scenario
from tests.pipeline.test_resume import SAVES, in_mid_run, kills, of, resumed
from tests.tiers import a_twentieth_and_all, enough, mostly_slow

pytestmark = pytest.mark.timeout(600)


@a_twentieth_and_all
def test_with_a_journal_open_groups_keep_their_numbers_and_batches_are_what_they_were(
    share: float, tmp_path_factory: pytest.TempPathFactory
):
    """Takes long in its full share: each drawn case is run whole and killed up to four times."""
    repeated = 0

    def check(drawn: tuple[Case, list[float]]) -> None:
        nonlocal repeated
        case, moments = drawn
        length = case.scenario().run().ended
        lives = [floor(length * moment / 20 / TICK) * TICK for moment in moments]
        scenario = replace(case.scenario(), journal=tmp_path_factory.mktemp("case") / "journal")
        whole = check_history(run_with_kills(scenario, lives))
        assert not [event for event in of(whole.record, GroupSettled) if event.reason == "resume"]
        first: dict[int, list[int]] = {}
        for taken in of(whole.record, BatchTaken):
            repeated += taken.fetch in first
            assert taken.numbers == first.setdefault(taken.fetch, taken.numbers)

    for_each(st.tuples(st.one_of(cases(save_freq=1), cases(save_freq=2)), kills), share * 100, check)
    assert repeated > enough(15, share), "batches that are never repeated prove nothing"


@pytest.mark.slow
@pytest.mark.parametrize("share", [1], ids=["all"])
def test_a_journal_whose_files_are_torn_anywhere_never_costs_a_group_or_the_balance(
    share: float, tmp_path_factory: pytest.TempPathFactory
):
    """Takes long in its full share: each drawn case is run whole and killed up to four times."""
    torn = 0

    def check(drawn: tuple[Case, list[float], random.Random]) -> None:
        case, moments, chance = drawn
        journal = tmp_path_factory.mktemp("case") / "journal"

        def tear() -> None:
            nonlocal torn
            for path in segments(journal):
                os.truncate(path, chance.randint(0, path.stat().st_size))
                torn += 1

        length = case.scenario().run().ended
        lives = [floor(length * moment / 20 / TICK) * TICK for moment in moments]
        check_history(run_with_kills(replace(case.scenario(), journal=journal), lives, between=tear))

    for_each(st.tuples(st.one_of(cases(save_freq=1), cases(save_freq=2)), kills, st.randoms()), share * 50, check)
    assert torn > enough(50, share)


def test_a_start_that_is_killed_leaves_the_journal_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Settings that are torn would be those of another run, and what was finished by them lost."""
    config = Scenario("async_stale", sections={"run": {"journal_sync_s": None}}).config
    made = FakeSource(8, 1).next()
    journal = RunJournal(tmp_path, config)
    journal.boundary(0, 0)
    journal.ended(0, made.group_id, Fate.FAILED, "no answer", 0)
    journal.close()

    def torn(path: Path, text: str) -> None:
        path.write_bytes(text[: len(text) // 2].encode())
        raise KeyboardInterrupt

    run = journal.run
    for before in (settings_of(config), dict(list(settings_of(config).items())[1:])):
        (tmp_path / "settings.json").write_text(json.dumps({**before, "run": run}))
        with monkeypatch.context() as killed, suppress(KeyboardInterrupt):
            killed.setattr(Path, "write_text", torn)
            RunJournal(tmp_path, config).restore(0, run)
        journal = RunJournal(tmp_path, config)
        journal.restore(0, journal.run)
        assert journal.end(0, made.group_id) == (Fate.FAILED, "no answer", 0)


def test_scores_are_those_of_the_same_answers_to_the_same_prompt(tmp_path: Path):
    config = Scenario("async_stale", sections={"run": {"journal_sync_s": None}}).config
    prompt = FakeSource(8, 1).next()
    assert prompt is not None
    said = Conversation([{"role": "user", "content": "2+2"}], [{"role": "assistant", "content": "4"}])
    answer = Trajectory(
        prompt.trajectory_id(0), "", "4", 1, 1, FinishReason.STOP, [[0, 0]], 0, 0, (), conversation=said
    )
    group = Group(0, prompt, 1, SamplingParams(1), trajectories=(answer,))
    others = [
        replace(group, prompt=replace(prompt, answer="5")),
        replace(group, prompt=replace(prompt, extra={"tests": ["f(1)"]})),
        replace(group, trajectories=(replace(answer, text="5"),)),
        replace(group, trajectories=(replace(answer, conversation=said._replace(completion=[])),)),
    ]
    journal = RunJournal(tmp_path, config)
    journal.boundary(0, 0)

    async def score() -> Scores:
        return Scores(np.ones(1, np.float32), {"right": [1.0]})

    async def asks() -> Scores:
        raise LookupError

    async def main() -> None:
        await journal.scores(group, score)
        journal.close()
        for asked in [*others, group]:
            again = RunJournal(tmp_path, config)
            again.restore(0, again.run)
            if asked is group:
                assert (await again.scores(asked, asks)).parts == {"right": [1.0]}
            else:
                with pytest.raises(LookupError):
                    await again.scores(asked, asks)

    run_virtual(main())


def test_a_file_that_cannot_be_removed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    journal = RunJournal(tmp_path, Scenario("async_stale", sections={"run": {"journal_sync_s": None}}).config)
    journal.boundary(0, 0)
    journal.ended(0, FakeSource(8, 1).next().group_id, Fate.FAILED, "no answer", 0)
    journal.close()
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: fails_to("remove"))
    for version in (1, 2):
        journal.boundary(version, 1000)
        journal.on_event(CheckpointSaved(time=0.0, version=version, path="", span=(0.0, 0.0)))
    assert (tmp_path / "driver.0.0").exists()


def test_a_writer_that_was_given_up_counts_so_until_all_groups_are_over_that_it_may_have_written_of(tmp_path: Path):
    """Its file was left by the process before: three blocks were admitted then, and one is when the run is resumed."""
    config = Scenario("async_stale", sections={"run": {"journal_sync_s": None}}).config
    block, fence = config.groups_per_version, tmp_path / "given-up-episode-worker-0"
    first = RunJournal(tmp_path, config)
    first.boundary(0, 0)
    first.ended(3 * block - 1, FakeSource(8, 1).next().group_id, Fate.FAILED, "no answer", 0)
    first.on_event(EpisodeWorkerLost(time=0.0, worker="episode-worker-0", reason="it died"))
    first.close()
    journal = RunJournal(tmp_path, config)
    journal.restore(0, journal.run)
    there = []
    for version in range(1, 6):
        journal.boundary(version, version * block)
        journal.on_event(VersionReached(time=0.0, version=version, groups={"admitted": version * block}))
        journal.on_event(CheckpointSaved(time=0.0, version=version, path="", span=(0.0, 0.0)))
        there.append(fence.exists())
    # The records before the checkpoint of version 3 go when that of version 4 is saved.
    assert there == [True, True, True, False, False] and segments(tmp_path) == []


def fails_to(what: str) -> None:
    raise PermissionError(f"may not {what}")


@mostly_slow("what", ["another run", "damaged", "gone", "none before"], quick=["another run"])
def test_a_journal_that_is_not_the_one_of_the_checkpoint_is_left_out_with_the_reason(what: str, tmp_path: Path):
    scenario = Scenario("async_partial", sections=SAVES, journal=tmp_path / "journal")
    _, state = in_mid_run(scenario)
    settings = tmp_path / "journal" / "settings.json"
    match what:
        case "another run":
            shutil.rmtree(tmp_path / "journal")
            scenario.run()
            why = f"{tmp_path / 'journal'} is of another run"
        case "damaged":
            settings.write_bytes(settings.read_bytes()[:-9])
            why = f"{tmp_path / 'journal'} has no settings.json that can be read"
        case "gone":
            shutil.rmtree(tmp_path / "journal")
            why = f"{tmp_path / 'journal'} has no settings.json that can be read"
        case _:
            state["journal"], why = None, "the checkpoint was saved without a journal"
    rest = resumed(scenario, state)
    (told,) = rest.of(Note)
    assert told.text.endswith(f": {why}")
    lost = len(state["ledger"]["open"])
    assert [event.reason for event in rest.of(GroupSettled)[:lost]] == ["resume"] * lost
    again = resumed(scenario, {**state, "journal": json.loads(settings.read_text())["run"]})
    assert not [event for event in again.of(Note) if "made anew" in event.text], "the checkpoint's id goes on"
