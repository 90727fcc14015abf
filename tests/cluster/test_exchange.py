"""The driver's view of transfers, over workers that only note what they are asked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from headway.cluster.roles.weight_roles import Left, Send, Sent
from headway.cluster.weight_sync.weight_sync import WeightSync
from headway.cluster.worker_group import Worker, WorkerGroup
from headway.config.schema import Config
from headway.config.sizing.timeouts import Timeouts
from headway.data.interfaces.weights import ReceiveReport, SendReport
from headway.engines.weights.protocols import HostCopy, Link, StoredVersion
from headway.engines.weights.weight_layout import Manifest, TensorSlot, combined
from headway.errors import UpdateFailed, UpdateMissed, WorkerDied

LIMITS = Timeouts(60, 10, 300)
SETTINGS = {"transport": "broadcast", "encoding": "delta"}
STORED = {**SETTINGS, "transport": "object_store"}
APART = {"schedule": "overlapped"}


class NotedRank:
    """Sends nothing, and fails when it is told to."""

    def __init__(self, number: int, share: Manifest) -> None:
        self.name = f"actor-{number}"
        self.share = share
        self.links: list[tuple[str, Link]] = []
        self.sends: list[tuple[int, Send]] = []
        self.failure: Exception | None = None
        self.fails_at: str | None = None
        """Dtype of which sending fails; None: of each."""
        self.asked = asyncio.Event()
        """To send, for the first time."""

    async def call(self, method: str, *args: Any) -> Any:
        if method == "outbox.connect":
            return self.links.append(cast(Any, args))
        assert method == "outbox.send_gathered"
        return await self.send(*args)

    async def send(self, version: int, send: Send) -> Sent:
        self.sends.append((version, send))
        self.asked.set()
        await asyncio.sleep(0)
        if self.failure is not None and self.fails_at in (None, send.dtype):
            raise self.failure
        digests = tuple(digest_of(slot.name) for slot in self.share.slots) or (len(send.dtype),)
        report = SendReport(0.0, 1.0, nbytes=8, checksum=combined(digests), full_nbytes=8)
        return Sent(report, digests, (StoredVersion(version, (), (), (self.name,)),))


def digest_of(name: str) -> int:
    return len(name)


class NotedTrainer:
    """Ranks, of which some send."""

    def __init__(self, shares: Sequence[Manifest], ranks: int) -> None:
        self.workers = [NotedRank(number, Manifest(())) for number in range(ranks)]
        self.verified: list[bool] = []
        self.senders = self.workers[: len(shares)]
        for rank, share in zip(self.senders, shares, strict=True):
            rank.share = share

    @property
    def links(self) -> list[tuple[str, Link]]:
        return self.workers[0].links

    @property
    def sends(self) -> list[tuple[int, Send]]:
        return self.workers[0].sends

    async def send_weights(self, version: int, send: Send, everywhere: bool, verify: bool) -> Sent:
        assert not everywhere
        self.verified.append(verify)
        first, *others = [await rank.send(version, send) for rank in self.senders]
        return first.joined([*others, *(None for _ in self.workers[len(self.senders) :])])

    async def gather_weights(self, version: int, verify: bool) -> Any:
        assert verify


class NotedReceiver:
    def __init__(self, name: str, machine: str | None = None) -> None:
        self.name = name
        self.machine = machine or name
        self.links: list[Sequence[Link]] = []
        self.staged: list[tuple[int, Left]] = []
        self.failure: Exception | None = None
        self.silent = False
        self.asked = asyncio.Event()
        """To stage, for the first time."""

    async def call(self, method: str, *args: Any) -> Any:
        if method == "memory_domain":
            return self.machine
        if method == "inbox.connect":
            if isinstance(self.failure, WorkerDied):
                raise self.failure
            return self.links.append(*args)
        assert method == "stage_weights"
        self.asked.set()
        if self.silent:
            await asyncio.Event().wait()
        if self.failure is not None:
            raise self.failure
        self.staged.append(cast(Any, args))
        return ReceiveReport(0.0, 0.0, 8, 7, path=f"where {self.name} has it")

    @property
    def lefts(self) -> list[Left]:
        return [left for _, left in self.staged]


def made(
    trainer: NotedTrainer,
    settings: dict[str, str],
    manifests: dict[str, Manifest],
    device: str = "cpu",
    timeouts: Timeouts = LIMITS,
) -> WeightSync:
    config = Config.model_validate({"param_update": settings})
    return WeightSync(
        cast(WorkerGroup, trainer),
        config,
        manifests,
        address=("127.0.0.1", 1),
        device=device,
        directory=None,
        timeouts=timeouts,
    )


async def exchange(
    settings: dict[str, str],
    dtypes: dict[str, str],
    copies: dict[str, str] | None = None,
    manifest: Manifest = Manifest(()),  # noqa: B008
    ranks: int = 1,
    timeouts: Timeouts = LIMITS,
) -> tuple[WeightSync, NotedTrainer, list[NotedReceiver]]:
    """``copies``: machine of each receiver; without, each is on its own."""
    trainer = NotedTrainer(manifest.shares(), ranks)
    between = made(trainer, settings, dict.fromkeys(dtypes.values(), manifest), timeouts=timeouts)
    receivers = [NotedReceiver(name, copies[name] if copies else None) for name in dtypes]
    for receiver, dtype in zip(receivers, dtypes.values(), strict=True):
        await between.add(receiver.name, [cast(Worker, receiver)], dtype)
    return between, trainer, receivers


TWO = {"a": "float32", "b": "float32"}
STORED_VERSION = StoredVersion(1, (), (), ("actor-0",))


async def together(between: WeightSync, version: int, names: Sequence[str]) -> SendReport:
    await between.reach(names)
    results = await asyncio.gather(
        between.send(version, names), *(between.stage(name, version) for name in names), return_exceptions=True
    )
    if failures := [result for result in results if isinstance(result, Exception)]:
        raise failures[0]
    return cast(SendReport, results[0])


async def apart(between: WeightSync, version: int, *names: str) -> SendReport:
    await between.reach(names)
    sent, *_ = await asyncio.gather(
        between.send_gathered(version, names), *(between.stage(name, version) for name in names)
    )
    return sent


async def test_a_link_serves_as_long_as_its_members_are_the_same_and_nothing_failed() -> None:
    between, trainer, (a, b) = await exchange(SETTINGS, TWO)
    for version in (1, 2):
        await together(between, version, ["a", "b"])
    assert len(trainer.links) == len(a.links) == len(b.links) == 1
    await together(between, 3, ["a"])
    assert (len(trainer.links), len(a.links), len(b.links)) == (2, 2, 1)
    generations = [link.generation for _, link in trainer.links]
    assert len(set(generations)) == 2, "no two groups meet under the same keys"
    assert trainer.links[-1][1].receivers == ("a",)


async def test_a_receiver_that_dies_at_a_meeting_fails_the_meeting_and_not_the_run() -> None:
    between, _, (_, b) = await exchange(SETTINGS, TWO)
    b.failure = WorkerDied("its process ended")
    with pytest.raises(UpdateFailed, match="b died before it met the trainer"):
        await between.reach(["a", "b"])
    await together(between, 1, ["a"])


async def test_a_meeting_that_failed_half_way_is_held_again() -> None:
    between, trainer, (_, b) = await exchange(SETTINGS, TWO)
    b.failure = WorkerDied("its process ended")
    for meetings in (1, 2):
        with pytest.raises(UpdateFailed, match="b died before it met the trainer"):
            await between.reach(["a", "b"])
        assert len(trainer.links) == meetings


async def test_apart_a_failure_at_one_receiver_leaves_the_links_of_the_others() -> None:
    between, trainer, (a, _) = await exchange({**SETTINGS, **APART}, TWO)
    await apart(between, 1, "a", "b")
    a.failure = UpdateFailed("a bucket came twice")
    with pytest.raises(UpdateFailed, match="came twice"):
        await apart(between, 2, "a")
    a.failure = None
    await apart(between, 3, "a", "b")
    assert [key for key, _ in trainer.links] == ["float32/a", "float32/b", "float32/a"]


async def test_after_a_failure_everybody_meets_anew_and_all_bytes_are_sent() -> None:
    between, trainer, (a, b) = await exchange(SETTINGS, TWO)
    await together(between, 1, ["a", "b"])
    await together(between, 2, ["a", "b"])
    assert [send.base for _, send in trainer.sends] == [None, 1]
    a.failure = UpdateFailed("a bucket came twice")
    with pytest.raises(UpdateFailed, match="came twice"):
        await together(between, 3, ["a", "b"])
    a.failure = None
    await together(between, 3, ["a", "b"])
    assert [send.base for _, send in trainer.sends[2:]] == [2, None]
    assert len(trainer.links) == len(b.links) == 2
    await together(between, 4, ["a", "b"])
    assert trainer.sends[-1][1].base == 3


async def test_receivers_that_hold_different_versions_get_all_bytes() -> None:
    between, trainer, _ = await exchange(SETTINGS, TWO)
    await together(between, 1, ["a", "b"])
    await together(between, 2, ["a"])
    await together(between, 3, ["a", "b"])
    assert [send.base for _, send in trainer.sends] == [None, 1, None]


async def test_a_dtype_whose_send_fails_does_not_keep_the_others_from_theirs() -> None:
    between, trainer, _ = await exchange({}, {"a": "float32", "b": "bfloat16"})
    await between.reach(["a", "b"])
    trainer.workers[0].failure, trainer.workers[0].fails_at = UpdateFailed("a left"), "float32"
    with pytest.raises(UpdateFailed, match="a left"):
        await between.send(1, ["a", "b"])
    assert [send.dtype for _, send in trainer.sends] == ["float32", "bfloat16"]


async def test_each_dtype_is_a_route_of_its_own_with_a_checksum_of_its_own() -> None:
    between, trainer, _ = await exchange(SETTINGS, {"a": "float32", "b": "bfloat16"})
    report = await together(between, 1, ["a", "b"])
    assert [send.dtype for _, send in trainer.sends] == ["float32", "bfloat16"]
    assert trainer.verified == [True, False], "one probe of the weights is enough"
    assert report.checksums == {"a": combined([len("float32")]), "b": combined([len("bfloat16")])}
    assert (report.nbytes, report.send_s) == (16, 2.0)


async def test_apart_a_stream_has_a_group_for_each_receiver() -> None:
    between, trainer, _ = await exchange({**SETTINGS, **APART}, TWO)
    await asyncio.gather(apart(between, 1, "a"), apart(between, 1, "b"))
    await apart(between, 2, "a")
    assert {key: link.receivers for key, link in trainer.links} == {"float32/a": ("a",), "float32/b": ("b",)}
    assert [send.base for _, send in trainer.sends] == [None, None, 1]


async def test_what_is_stored_is_sent_once_for_all_and_it_goes_to_each() -> None:
    between, trainer, (a, b) = await exchange({**STORED, **APART}, TWO)
    await between.gather(1)
    reports = await asyncio.gather(apart(between, 1, "a"), apart(between, 1, "b"))
    assert len(trainer.sends) == 1
    assert sorted(report.nbytes for report in reports) == [0, 8], "what was sent once counts once"
    assert a.staged == b.staged == [(1, (STORED_VERSION,))]


async def test_one_that_missed_a_stored_version_has_the_next_sent_whole_once_more() -> None:
    between, trainer, _ = await exchange({**STORED, **APART}, TWO)
    for version, names in ((1, "ab"), (2, "a"), (3, "ab")):
        await between.gather(version)
        for name in names:
            await apart(between, version, name)
    assert [(version, send.base) for version, send in trainer.sends] == [(1, None), (2, 1), (3, 2), (3, None)]


async def test_when_sending_fails_who_waits_for_the_version_is_told_at_once() -> None:
    between, trainer, (a, _) = await exchange(STORED, TWO)
    trainer.workers[0].failure = UpdateFailed("no space left")
    await between.reach(["a", "b"])
    results = await asyncio.gather(
        between.send(1, ["a", "b"]), between.stage("a", 1), between.stage("b", 1), return_exceptions=True
    )
    assert all(isinstance(result, UpdateFailed) and "no space left" in str(result) for result in results)
    trainer.workers[0].failure = None
    await together(between, 1, ["a", "b"])
    assert a.staged == [(1, (STORED_VERSION,))]


async def test_who_asked_first_for_a_stored_version_may_be_left_out_before_it_is_there() -> None:
    between, trainer, (_, b) = await exchange({**STORED, **APART}, TWO)
    await between.gather(1)
    await between.reach(["a", "b"])
    first = asyncio.create_task(between.send_gathered(1, ["a"]))
    await trainer.workers[0].asked.wait()
    first.cancel()
    await asyncio.gather(between.send_gathered(1, ["b"]), between.stage("b", 1))
    assert len(trainer.sends) == len(b.staged) == 1


async def test_one_that_could_not_use_what_was_stored_gets_it_anew_and_others_keep_theirs() -> None:
    between, trainer, (a, _) = await exchange({**STORED, **APART}, TWO)
    await between.gather(1)
    a.failure = UpdateFailed("a bucket is corrupted")
    with pytest.raises(UpdateFailed, match="corrupted"):
        await apart(between, 1, "a")
    a.failure = None
    await apart(between, 1, "b")
    assert len(trainer.sends) == 1
    await apart(between, 1, "a")
    assert len(trainer.sends) == 2


async def test_a_late_receiver_of_what_is_stored_opens_its_own_end_only() -> None:
    between, trainer, (a, b) = await exchange({**STORED, **APART}, TWO)
    await between.gather(1)
    await apart(between, 1, "a")
    await apart(between, 1, "b")
    assert (len(trainer.links), len(a.links), len(b.links)) == (1, 1, 1)
    assert [trainer.links[0][1]] == a.links[0] == b.links[0]


# ------------------------------------------------------------------------------------------ one copy on a machine

THREE = {"a": "float32", "b": "float32", "c": "float32"}
ONE_MACHINE = dict.fromkeys(THREE, "here")


def found(version: int, owner: NotedReceiver) -> tuple[int, HostCopy]:
    return version, HostCopy(version, f"where {owner.name} has it", 7)


@pytest.mark.parametrize("settings", [SETTINGS, STORED], ids=["streamed", "stored"])
async def test_of_a_machine_one_worker_receives_and_the_others_map_its_copy(settings: dict[str, str]) -> None:
    between, trainer, (a, b, c) = await exchange(settings, THREE, ONE_MACHINE)
    for version in (1, 2):
        report = await together(between, version, ["a", "b", "c"])
        assert set(report.checksums or {}) == {"a", "b", "c"} and report.nbytes == 8
    assert [send.base for _, send in trainer.sends] == [None, 1]
    assert trainer.links[0][1].receivers == ("a",) if settings is SETTINGS else True
    assert (len(a.links), len(b.links), len(c.links)) == (1, 0, 0)
    assert a.lefts == ([(), ()] if settings is SETTINGS else [(STORED_VERSION,), (replace(STORED_VERSION, version=2),)])
    assert b.staged == c.staged == [found(1, a), found(2, a)]
    assert {between.copy_of(name) for name in THREE} == {"float32/here"}


async def test_workers_of_one_receiver_on_two_machines_have_a_copy_on_each() -> None:
    between, trainer, _ = await exchange(SETTINGS, {})
    between._manifests = {"float32": Manifest(())}
    ranks = [NotedReceiver(f"logp-{number}", machine) for number, machine in enumerate(["here", "here", "there"])]
    await between.add("logp", cast(Any, ranks), "float32")
    await together(between, 1, ["logp"])
    assert trainer.links[0][1].receivers == ("logp-0", "logp-2")
    assert [rank.staged for rank in ranks] == [[(1, ())], [found(1, ranks[0])], [(1, ())]]
    assert between.copy_of("logp") == "float32/here/logp, float32/there/logp"


async def test_who_shares_with_nobody_receives_by_itself() -> None:
    """Such as those that receive in place."""
    between, trainer, receivers = await exchange(SETTINGS, THREE)
    await together(between, 1, ["a", "b", "c"])
    assert trainer.links[0][1].receivers == ("a", "b", "c")
    assert all(receiver.staged == [(1, ())] for receiver in receivers)


async def test_when_the_owner_dies_the_others_say_so_and_the_next_one_to_receive_is_another() -> None:
    between, trainer, (a, b, c) = await exchange(SETTINGS, THREE, ONE_MACHINE)
    await together(between, 1, ["a", "b", "c"])
    a.failure = WorkerDied("its process ended")
    await between.reach(["a", "b", "c"])
    _, *failures = await asyncio.gather(
        between.send(2, ["a", "b", "c"]), *(between.stage(name, 2) for name in "abc"), return_exceptions=True
    )
    assert failures[0] is a.failure
    for name, failure in zip("bc", failures[1:], strict=True):
        assert isinstance(failure, UpdateFailed)
        assert str(failure) == f"{name} was to map the copy of version 2 that a has: its process ended"
    await together(between, 2, ["b", "c"])
    assert trainer.links[-1][1].receivers == ("b",) and trainer.sends[-1][1].base is None
    assert b.lefts[-1] == () and c.staged[-1] == found(2, b)
    await together(between, 3, ["b", "c"])
    assert trainer.sends[-1][1].base == 2


async def test_a_failure_of_the_owner_is_its_own_and_the_others_miss_the_version_and_go_on_without_it() -> None:
    between, trainer, (a, b, c) = await exchange(SETTINGS, THREE, ONE_MACHINE)
    a.failure = UpdateFailed("a bucket came twice")
    await between.reach(["a", "b", "c"])
    answers = await asyncio.gather(*(between.stage(name, 1) for name in "abc"), return_exceptions=True)
    assert [type(answer) for answer in answers] == [UpdateFailed, UpdateMissed, UpdateMissed]
    await together(between, 1, ["b", "c"])
    assert trainer.links[-1][1].receivers == ("b",) and c.staged == [found(1, b)]


async def test_one_that_cannot_map_the_copy_leaves_it_as_it_is() -> None:
    between, trainer, (a, b, c) = await exchange(SETTINGS, THREE, ONE_MACHINE)
    await together(between, 1, ["a", "b", "c"])
    b.failure = UpdateFailed("cannot be mapped")
    with pytest.raises(UpdateFailed, match="cannot be mapped"):
        await together(between, 2, ["a", "b", "c"])
    b.failure = None
    await together(between, 3, ["a", "b", "c"])
    assert [send.base for _, send in trainer.sends] == [None, 1, 2]
    assert len(a.links) == 1 and c.staged[-1] == found(3, a)


async def test_while_the_owner_is_silent_the_others_answer_before_the_attempt_is_over() -> None:
    between, trainer, (a, b, c) = await exchange(SETTINGS, THREE, ONE_MACHINE, timeouts=Timeouts(60, 0.1, 300))
    a.silent = True
    await between.reach(["a", "b", "c"])
    silent = asyncio.create_task(between.stage("a", 1))
    answers = await asyncio.gather(*(between.stage(name, 1) for name in "bc"), return_exceptions=True)
    for answer in answers:
        assert isinstance(answer, UpdateMissed)
        assert "version 1 that a has: it did not receive that within 0.09 s" in str(answer)
    assert not silent.done()
    silent.cancel()
    await asyncio.wait([silent])
    await together(between, 1, ["b", "c"])
    assert trainer.links[-1][1].receivers == ("b",) and c.staged == [found(1, b)]
    await together(between, 2, ["b", "c"])
    assert trainer.sends[-1][1].base == 1, "what becomes of the first owner is no fault of the second"


async def test_an_owner_that_is_left_out_is_said_to_be() -> None:
    between, _, (a, *_) = await exchange(SETTINGS, THREE, ONE_MACHINE)
    a.silent = True
    await between.reach(["a", "b"])
    owner, other = (asyncio.create_task(between.stage(name, 1)) for name in "ab")
    await a.asked.wait()
    owner.cancel()
    with pytest.raises(UpdateFailed, match="version 1 that a has: it was left out"):
        await other


async def test_a_failure_that_comes_after_another_took_its_place_is_not_the_others() -> None:
    """The next version begins while the last one's owner still has not answered."""
    between, trainer, (a, b, c) = await exchange(SETTINGS, THREE, ONE_MACHINE)
    a.silent = True
    await between.reach(["a", "b", "c"])
    silent = asyncio.create_task(between.stage("a", 1))
    await a.asked.wait()
    for version in (1, 2):
        await together(between, version, ["b", "c"])
    assert silent.done()
    assert c.staged == [found(1, b), found(2, b)]
    assert [send.base for _, send in trainer.sends] == [None, 1]


@pytest.mark.parametrize("settings", [SETTINGS, STORED], ids=["streamed", "stored"])
async def test_apart_a_machine_is_sent_a_version_once(settings: dict[str, str]) -> None:
    between, trainer, (a, b, c) = await exchange({**settings, **APART}, THREE, {"a": "here", "b": "here", "c": "there"})
    await between.gather(1)
    here, there = await asyncio.gather(apart(between, 1, "a", "b"), apart(between, 1, "c"))
    assert len(trainer.sends) == (2 if settings is SETTINGS else 1)
    assert here.nbytes + there.nbytes == 8 * len(trainer.sends)
    assert b.staged == [found(1, a)] and len(a.staged) == len(c.staged) == 1
    if settings is SETTINGS:
        assert {key: link.receivers for key, link in trainer.links} == {
            "float32/here": ("a",),
            "float32/there": ("c",),
        }


async def test_a_replacement_under_the_same_name_takes_the_place_of_one_that_is_gone() -> None:
    between, trainer, (a, b) = await exchange(SETTINGS, TWO, dict.fromkeys(TWO, "here"))
    await together(between, 1, ["a", "b"])
    again = NotedReceiver("a", "here")
    await between.add("a", [cast(Worker, again)], "float32")
    await together(between, 2, ["a", "b"])
    assert len(a.staged) == 1 and again.lefts == [()] and b.staged[-1] == found(2, again)
    assert [send.base for _, send in trainer.sends] == [None, None]


# ------------------------------------------------------------------------------------------ several senders

LAYOUT = Manifest(tuple(TensorSlot("w" * (k + 1), (10,), "float32", 40 * k, 40) for k in range(5)))


@pytest.mark.parametrize("apart_", [False, True])
@pytest.mark.parametrize("settings", [SETTINGS, STORED], ids=["streamed", "stored"])
async def test_each_rank_that_sends_has_a_link_of_its_own_and_their_results_are_joined(
    settings: dict[str, str], apart_: bool
) -> None:
    checksums = []
    for senders in (1, 2):
        manifest = replace(LAYOUT, senders=senders)
        chosen = {**settings, **(APART if apart_ else {})}
        between, trainer, (a,) = await exchange(chosen, {"a": "float32"}, None, manifest, ranks=3)
        if apart_:
            await between.gather(1)
        report = await (apart(between, 1, "a") if apart_ else together(between, 1, ["a"]))
        checksums.append(report.checksum)
        assert (report.nbytes, report.full_nbytes, report.send_s) == (8 * senders, 8 * senders, 1.0)
        assert [len(rank.links) for rank in trainer.workers] == [1] * senders + [0] * (3 - senders)
        assert a.links == [[rank.links[0][1] for rank in trainer.senders]]
        assert [len(rank.sends) for rank in trainer.senders] == [1] * senders
        stored_versions = tuple(StoredVersion(1, (), (), (f"actor-{number}",)) for number in range(senders))
        assert a.staged == [(1, () if settings is SETTINGS else stored_versions)]
        if settings is SETTINGS:
            assert len({link.generation for link in a.links[0]}) == senders
    assert checksums[0] == checksums[1] == combined([digest_of(slot.name) for slot in LAYOUT.slots])


async def test_when_one_of_several_senders_fails_nobody_counts_as_having_the_version() -> None:
    between, trainer, (a,) = await exchange(SETTINGS, {"a": "float32"}, None, replace(LAYOUT, senders=2), ranks=2)
    await together(between, 1, ["a"])
    trainer.workers[1].failure = UpdateFailed("no memory")
    a.failure = UpdateFailed("a share ended early")
    with pytest.raises(UpdateFailed, match="no memory"):
        await together(between, 2, ["a"])
    trainer.workers[1].failure = a.failure = None
    await together(between, 2, ["a"])
    assert [send.base for _, send in trainer.sends] == [None, 1, None]
    assert len(a.links) == 2


@pytest.mark.parametrize(
    ("update", "device", "expected"),
    [
        ({}, "cpu", ("broadcast", "cpu", False)),
        ({}, "cuda", ("broadcast", "cuda", False)),
        ({"schedule": "overlapped"}, "cuda", ("broadcast", "cpu", True)),
        ({"transport": "object_store"}, "cuda", ("object_store", "cpu", False)),
    ],
)
def test_buckets_go_from_gpu_to_gpu_only_while_nobody_trains(
    update: dict[str, Any], device: str, expected: tuple[str, str, bool]
) -> None:
    between = made(NotedTrainer((), 1), update, {}, device)
    assert (between._transport, between._device, between._apart) == expected
