"""A training rank's role: what it sends and reports, and what a snapshot of it holds."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headway.cluster.roles.training_roles import ActorRole
from headway.cluster.roles.weight_roles import Send, Sent, WeightSendRole
from headway.data.interfaces.weights import SendReport
from headway.engines.train.fsdp import column_engines, engine
from headway.engines.weights.protocols import EndContext
from headway.engines.weights.weight_layout import Manifest, build_manifest
from headway.errors import UpdateFailed
from tests.cluster.one_version import tiny_config

SEND = Send("float32", "float32", None)


def role(rank: int, **more: Any) -> Any:
    common: dict[str, Any] = {"config": tiny_config("inline"), "model_path": "m", "name": f"actor-{rank}"}
    common |= {"device": "cpu", "threads": 1, "fetch": list, "put": lambda value: value, "rank": rank, "world_size": 2}
    return ActorRole(**common, total_optimizer_steps=4, **more)


class Probed:
    """An engine that counts how often the probe was computed."""

    probes = 0

    def gather(self, *arguments: Any, everywhere: bool) -> None: ...

    def probe(self) -> np.ndarray[Any, Any]:
        self.probes += 1
        return np.zeros(2, np.float32)


def test_a_rank_whose_send_fails_computes_the_probe_with_the_others() -> None:
    def fails(*_: Any) -> Sent:
        raise UpdateFailed("the receiver went away")

    one = role(1)
    one._engine, one.outbox = Probed(), SimpleNamespace(send=fails)
    with pytest.raises(UpdateFailed, match="went away"):
        one.send_weights(1, SEND, False, True)
    assert one._engine.probes == 1


@pytest.mark.parametrize(
    ("rank", "everywhere", "told"), [(0, False, True), (1, False, True), (0, True, True), (1, True, False)]
)
def test_what_all_ranks_send_alike_is_told_once(rank: int, everywhere: bool, told: bool) -> None:
    one = role(rank)
    one._engine = Probed()
    one.outbox = SimpleNamespace(send=lambda *_: Sent(SendReport(0.0, 0.0, 4, 0), (), ()))
    sent = one.send_weights(1, SEND, everywhere, True)
    assert (sent is not None) == told
    assert one._engine.probes == 1
    if told:
        assert sent.report.probe.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("steps", [None, 4])
def test_a_snapshot_has_the_state_of_a_critic_that_shares_the_trainers_ranks(
    steps: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "FsdpEngine", lambda *_: SimpleNamespace(learner="the policy's"))
    monkeypatch.setattr(column_engines, "FsdpCritic", lambda *_: SimpleNamespace(learner="the critic's"))
    one = role(0, total_critic_steps=steps)
    one._mesh = None
    one._load_models()
    assert one.snapshot.learners == ["the policy's", "the critic's"][: 1 if steps is None else 2]


@pytest.mark.parametrize("settings", [{"encoding": "delta"}, {}], ids=["with copies", "without"])
def test_a_rank_without_a_share_takes_part_in_gathering(settings: dict[str, str]) -> None:
    manifest = build_manifest([("w", (4,), torch.float32)])
    outbox = WeightSendRole(tiny_config("inline", param_update=settings), 1, EndContext("127.0.0.1", id, list))
    outbox.open_route("float32", manifest, pinned=False)
    drawn: list[int] = []

    def gather(manifest: Manifest, nbytes: int) -> Iterator[Any]:
        for window in range(3):
            drawn.append(window)
            yield window

    assert outbox.send(1, SEND, gather) is None
    assert outbox.gather(2, gather).nbytes == 0
    assert drawn == [0, 1, 2] * 2


def test_bytes_of_gathered_copies_are_those_of_all_dtypes() -> None:
    settings = {"schedule": "overlapped"}
    outbox = WeightSendRole(tiny_config("inline", param_update=settings), 0, EndContext("127.0.0.1", id, list))
    for dtype in (torch.bfloat16, torch.float32):
        outbox.open_route(str(dtype), build_manifest([("w", (4,), dtype)]), pinned=False)

    def gather(manifest: Manifest, nbytes: int) -> Iterator[Any]:
        yield 0, torch.zeros(manifest.nbytes, dtype=torch.uint8)

    assert outbox.gather(1, gather).nbytes == 8 + 16
