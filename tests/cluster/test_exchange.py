"""The driver's view of transfers, over workers that only note what they are asked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from headway.cluster.exchange import Exchange, ExchangeSettings, exchange_settings
from headway.cluster.roles.outbox import Send, Sent, SentWeights
from headway.cluster.worker_group import Worker, WorkerGroup
from headway.config.schema import Config
from headway.errors import ConfigError, UpdateFailed, WorkerDied
from headway.interfaces import ReceiveReport, SendReport
from headway.weights.layout import Manifest
from headway.weights.protocols import Parcel
from headway.weights.transports.links import Link

SETTINGS = ExchangeSettings(
    transport="broadcast",
    streamed=True,
    apart=False,
    with_delta=True,
    verify=True,
    timeout_s=5,
    address=("127.0.0.1", 1),
    device="cpu",
    directory=None,
)
STORED = replace(SETTINGS, transport="object_store", streamed=False)


class NotedTrainer:
    """Rank zero. Sends nothing, and fails when it is told to."""

    workers = (type("Rank", (), {"name": "actor-0"}),)

    def __init__(self) -> None:
        self.links: list[tuple[str, Link]] = []
        self.sends: list[tuple[int, Send]] = []
        self.failure: Exception | None = None
        self.asked = asyncio.Event()
        """To send, for the first time."""

    async def connect(self, key: str, link: Link) -> None:
        self.links.append((key, link))

    async def send_weights(self, version: int, sends: Sequence[Send], everywhere: bool, verify: bool) -> SentWeights:
        assert verify and not everywhere
        return SentWeights(tuple([await self.send_gathered(version, send) for send in sends]), None)

    async def gather_weights(self, version: int, verify: bool) -> Any:
        assert verify

    def send_gathered(self, version: int, send: Send) -> asyncio.Task[Sent]:
        return asyncio.create_task(self._send(version, send))

    async def _send(self, version: int, send: Send) -> Sent:
        self.sends.append((version, send))
        self.asked.set()
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        report = SendReport(0.0, 1.0, nbytes=8, checksum=len(send.dtype), full_nbytes=8)
        return Sent(report, Parcel(version, (), (), ()))


class NotedReceiver:
    def __init__(self, name: str) -> None:
        self.name = name
        self.links: list[Link] = []
        self.staged: list[tuple[int, Parcel | None]] = []
        self.failure: Exception | None = None

    async def call(self, method: str, *args: Any) -> Any:
        if method == "connect":
            if isinstance(self.failure, WorkerDied):
                raise self.failure
            return self.links.append(*args)
        assert method == "stage_weights"
        if self.failure is not None:
            raise self.failure
        self.staged.append(cast(Any, args))
        return ReceiveReport(0.0, 0.0, 8, 7)


def exchange(settings: ExchangeSettings, dtypes: dict[str, str]) -> tuple[Exchange, NotedTrainer, list[NotedReceiver]]:
    trainer = NotedTrainer()
    between = Exchange(cast(WorkerGroup, trainer), settings, dict.fromkeys(dtypes.values(), Manifest(())))
    receivers = [NotedReceiver(name) for name in dtypes]
    for receiver, dtype in zip(receivers, dtypes.values(), strict=True):
        between.add(receiver.name, [cast(Worker, receiver)], dtype)
    return between, trainer, receivers


TWO = {"a": "float32", "b": "float32"}


async def together(between: Exchange, version: int, names: Sequence[str]) -> SendReport:
    await between.reach(names)
    results = await asyncio.gather(
        between.send(version, names), *(between.stage(name, version) for name in names), return_exceptions=True
    )
    if failures := [result for result in results if isinstance(result, Exception)]:
        raise failures[0]
    return cast(SendReport, results[0])


async def apart(between: Exchange, version: int, name: str) -> SendReport:
    await between.reach([name])
    sent, _ = await asyncio.gather(between.send_gathered(version, name), between.stage(name, version))
    return sent


async def test_a_link_serves_as_long_as_its_members_are_the_same_and_nothing_failed() -> None:
    between, trainer, (a, b) = exchange(SETTINGS, TWO)
    for version in (1, 2):
        await together(between, version, ["a", "b"])
    assert len(trainer.links) == len(a.links) == len(b.links) == 1
    await together(between, 3, ["a"])
    assert (len(trainer.links), len(a.links), len(b.links)) == (2, 2, 1)
    generations = [link.data.generation for _, link in trainer.links]
    assert len(set(generations)) == 2, "no two groups meet under the same keys"
    assert trainer.links[-1][1].data.receivers == ("a",)


async def test_a_receiver_that_dies_at_a_meeting_fails_the_meeting_and_not_the_run() -> None:
    between, _, (_, b) = exchange(SETTINGS, TWO)
    b.failure = WorkerDied("its process ended")
    with pytest.raises(UpdateFailed, match="b died before it met the trainer: its process ended"):
        await between.reach(["a", "b"])
    await together(between, 1, ["a"])


async def test_after_a_failure_everybody_meets_anew_and_all_bytes_are_sent() -> None:
    between, trainer, (a, b) = exchange(SETTINGS, TWO)
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
    between, trainer, _ = exchange(SETTINGS, TWO)
    await together(between, 1, ["a", "b"])
    await together(between, 2, ["a"])
    await together(between, 3, ["a", "b"])
    assert [send.base for _, send in trainer.sends] == [None, 1, None]


async def test_each_dtype_is_a_route_of_its_own_with_a_checksum_of_its_own() -> None:
    between, trainer, _ = exchange(SETTINGS, {"a": "float32", "b": "bfloat16"})
    report = await together(between, 1, ["a", "b"])
    assert [send.dtype for _, send in trainer.sends] == ["float32", "bfloat16"]
    assert report.checksums == {"a": len("float32"), "b": len("bfloat16")}
    assert (report.nbytes, report.send_s) == (16, 2.0)


async def test_apart_a_stream_has_a_group_for_each_receiver() -> None:
    between, trainer, _ = exchange(replace(SETTINGS, apart=True), TWO)
    await asyncio.gather(apart(between, 1, "a"), apart(between, 1, "b"))
    await apart(between, 2, "a")
    assert {key: link.data.receivers for key, link in trainer.links} == {"float32/a": ("a",), "float32/b": ("b",)}
    assert [send.base for _, send in trainer.sends] == [None, None, 1]


async def test_what_is_stored_is_sent_once_for_all_and_its_parcel_goes_to_each() -> None:
    between, trainer, (a, b) = exchange(replace(STORED, apart=True), TWO)
    await between.gather(1)
    reports = await asyncio.gather(apart(between, 1, "a"), apart(between, 1, "b"))
    assert len(trainer.sends) == 1
    assert sorted(report.nbytes for report in reports) == [0, 8], "what was sent once counts once"
    assert a.staged == b.staged == [(1, Parcel(1, (), (), ()))]


async def test_one_that_missed_a_stored_version_has_the_next_sent_whole_once_more() -> None:
    between, trainer, _ = exchange(replace(STORED, apart=True), TWO)
    for version, names in ((1, "ab"), (2, "a"), (3, "ab")):
        await between.gather(version)
        for name in names:
            await apart(between, version, name)
    assert [(version, send.base) for version, send in trainer.sends] == [(1, None), (2, 1), (3, 2), (3, None)]


async def test_when_sending_fails_who_waits_for_the_parcel_is_told_at_once() -> None:
    between, trainer, (a, _) = exchange(STORED, TWO)
    trainer.failure = UpdateFailed("no space left")
    await between.reach(["a", "b"])
    results = await asyncio.gather(
        between.send(1, ["a", "b"]), between.stage("a", 1), between.stage("b", 1), return_exceptions=True
    )
    assert all(isinstance(result, UpdateFailed) and "no space left" in str(result) for result in results)
    trainer.failure = None
    await together(between, 1, ["a", "b"])
    assert a.staged == [(1, Parcel(1, (), (), ()))]


async def test_who_asked_first_for_a_stored_version_may_be_left_out_before_it_is_there() -> None:
    between, trainer, (_, b) = exchange(replace(STORED, apart=True), TWO)
    await between.gather(1)
    await between.reach(["a", "b"])
    first = asyncio.create_task(between.send_gathered(1, "a"))
    await trainer.asked.wait()
    first.cancel()
    await asyncio.gather(between.send_gathered(1, "b"), between.stage("b", 1))
    assert len(trainer.sends) == len(b.staged) == 1


async def test_one_that_could_not_use_what_was_stored_gets_it_anew_and_others_keep_theirs() -> None:
    between, trainer, (a, _) = exchange(replace(STORED, apart=True), TWO)
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
    between, trainer, (a, b) = exchange(replace(STORED, apart=True), TWO)
    await between.gather(1)
    await apart(between, 1, "a")
    await apart(between, 1, "b")
    assert (len(trainer.links), len(a.links), len(b.links)) == (1, 1, 1)
    assert trainer.links[0][1] == a.links[0] == b.links[0]


@pytest.mark.parametrize(
    ("update", "device", "expected"),
    [
        ({}, "cpu", ("broadcast", "cpu", False)),
        ({}, "cuda", ("broadcast", "cuda", False)),
        ({"backend": "gloo"}, "cuda", ("broadcast", "cpu", False)),
        ({"schedule": "overlapped"}, "cuda", ("broadcast", "cpu", True)),
        ({"transport": "object_store"}, "cuda", ("object_store", "cpu", False)),
    ],
)
def test_buckets_go_from_gpu_to_gpu_only_while_nobody_trains(
    update: dict[str, Any], device: str, expected: tuple[str, str, bool]
) -> None:
    settings = exchange_settings(Config.model_validate({"param_update": update}), None, device, None)
    assert (settings.transport, settings.device, settings.apart) == expected


def test_nccl_without_gpus_is_refused() -> None:
    with pytest.raises(ConfigError, match="the workers compute on CPUs"):
        exchange_settings(Config.model_validate({"param_update": {"backend": "nccl"}}), None, "cpu", None)
