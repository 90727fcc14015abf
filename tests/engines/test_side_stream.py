"""Work beside what computes: a receiving thread waits for its stream before anybody is told, and what computes waits
for what was copied to the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.data.interfaces.weights import ReceiveReport
from headway.devices import KINDS, Cpu, DeviceStream, kind_of
from headway.engines.train.fsdp.micro_batches import collate, filler_row, on_device
from headway.engines.weights.incoming_version import Intake
from headway.engines.weights.receiver_state import ReceiverState
from headway.engines.weights.served_weights import WeightUpdates, outcome
from headway.engines.weights.weight_layout import Manifest


class Streams:
    """Stands in for torch.cuda's streams, and notes what is asked of them in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, broken: bool = False) -> None:
        self.calls: list[str] = []
        self.broken = broken
        monkeypatch.setattr("torch.cuda.Stream", self._make)
        monkeypatch.setattr("torch.cuda.default_stream", lambda device: "default")
        monkeypatch.setattr("torch.cuda.stream", self._use)

    def _make(self, device: torch.device) -> Any:
        self.calls.append(f"make on {device}")
        streams = self

        class Stream:
            def wait_stream(self, other: str) -> None:
                streams.calls.append(f"wait for {other}")

            def synchronize(self) -> None:
                streams.calls.append("host waits")
                if streams.broken:
                    raise RuntimeError("CUDA error")

        return Stream()

    @contextmanager
    def _use(self, stream: Any) -> Iterator[None]:
        self.calls.append("use")
        yield
        self.calls.append("leave")


def side_stream(device: str) -> DeviceStream:
    stream = kind_of(device).side_stream(torch.device(device))
    assert stream is not None
    return stream


def test_work_begins_behind_the_default_stream_and_has_ended_when_the_block_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = Streams(monkeypatch)
    side = side_stream("cuda:1")
    for _ in range(2):
        with side.working():
            streams.calls.append("receive")
    once = ["wait for default", "use", "receive", "leave", "host waits"]
    assert streams.calls == ["make on cuda:1", *once, *once]


@pytest.mark.parametrize("broken", [False, True])
def test_after_a_failure_the_host_waits_too_and_the_first_error_is_told(
    broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = Streams(monkeypatch, broken=broken)
    with pytest.raises(KeyError, match="lost"), side_stream("cuda").working():
        raise KeyError("lost")
    assert streams.calls[-1] == "host waits"


def test_on_a_cpu_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    assert kind_of("cpu").side_stream("cpu") is None
    assert streams.calls == []


async def test_a_version_is_received_on_the_side_stream_of_the_engines_device(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)

    class Noting(Intake):
        def _take_in(self, version: int, receive: Any) -> ReceiveReport:
            streams.calls.append("fill")
            return ReceiveReport(recv_s=0.0, register_s=0.0, checksum=0, nbytes=0)

        def room(self, *_: Any) -> Any: ...

        def take(self, *_: Any) -> None: ...

        def digests(self, *_: Any) -> Any: ...

    intake = Noting(Manifest(()), ReceiverState("replica"))
    updates = WeightUpdates(intake, lambda version, sink: None, torch.device("cuda:0"))
    await outcome(updates.start(1))
    updates.close()
    assert streams.calls == ["make on cuda:0", "wait for default", "use", "fill", "leave", "host waits"]


def test_a_micro_batch_is_copied_on_a_stream_of_its_own_and_what_computes_waits_for_it_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = Streams(monkeypatch)
    computing = SimpleNamespace(wait_stream=lambda _: streams.calls.append("computing waits"))
    copy, take = torch.Tensor.copy_, torch.empty_like

    def copied(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        streams.calls.extend(["copy"] * non_blocking)  # what fills the buffer on the host blocks
        return copy(self, source)

    def taken(*given: Any, **more: Any) -> torch.Tensor:
        streams.calls.append("take")
        return take(*given, **more)

    def recorded(self: torch.Tensor, stream: object) -> None:
        assert stream is computing
        streams.calls.append("kept until it was read")

    class WithStreams(Cpu):
        def side_stream(self, device: torch.device | str) -> DeviceStream:
            return DeviceStream(torch.cuda, device)

    monkeypatch.setitem(KINDS, "cpu", WithStreams())
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: computing)
    monkeypatch.setattr(torch, "empty_like", taken)
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    monkeypatch.setattr(torch.Tensor, "record_stream", recorded)
    packed = collate([filler_row()])
    (first,), _ = on_device(torch.device("cpu"), packed), on_device(torch.device("cpu"), packed)
    once = ["use", "take", "copy", "leave", "computing waits", "kept until it was read"]
    assert streams.calls == ["make on cpu", *once, *once]
    assert torch.equal(first.targets, packed.targets)
