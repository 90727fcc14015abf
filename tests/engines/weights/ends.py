"""Both ends of a transport, over threads of this process."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from headway.config.transport_facts import TRANSPORTS
from headway.data.interfaces.weights import ReceiveReport
from headway.engines.weights.incoming_version import BackBuffer, InPlace, Receive
from headway.engines.weights.protocols import (
    EndContext,
    IncomingWeights,
    Link,
    OutgoingWeights,
    StoredVersion,
    WeightReceiver,
    WeightSender,
    open_receiver,
    open_sender,
)
from headway.engines.weights.transports.process_group import open_store
from headway.engines.weights.weight_layout import Manifest
from headway.errors import UpdateFailed
from tests.engines.weights.versions import MANIFEST

PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload(["headway.engines.weights.transports.broadcast"])  # torch is imported once for all
HOST = "127.0.0.1"
ALL = tuple(TRANSPORTS)
STREAMED = tuple(name for name, facts in TRANSPORTS.items() if facts.streamed)
STORED = tuple(name for name in ALL if name not in STREAMED)


class Store:
    """An object store in a dictionary. What it hands out is read-only, as real ones' objects are."""

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}

    def put(self, value: Any) -> int:
        value.setflags(write=False)
        self._objects[len(self._objects)] = value
        return len(self._objects) - 1

    def fetch(self, handles: Sequence[int]) -> list[Any]:
        return [self._objects[handle] for handle in handles]


@dataclass
class Outcome:
    """How an update ended at each end."""

    sent: Exception | None = None
    stored: StoredVersion | None = None
    reports: dict[str, ReceiveReport] = field(default_factory=dict)
    errors: dict[str, Exception] = field(default_factory=dict)


def arrival(receiver: WeightReceiver, version: int, stored: StoredVersion | None) -> Receive:
    """Lets ``version`` come in, in one share."""

    def receive(incoming: IncomingWeights) -> None:
        (sink,) = incoming.expect([incoming.manifest])
        receiver.receive(version, sink, stored)

    return receive


class Ends:
    """A sender and its receivers."""

    def __init__(self, link: Link, names: Sequence[str], pool: ThreadPoolExecutor, here: EndContext) -> None:
        self.link = link
        self._pool = pool
        opening = {name: pool.submit(open_receiver, link, name, here) for name in names}
        self.sender: WeightSender = open_sender(link, here)
        self.receivers: dict[str, WeightReceiver] = {name: end.result(60) for name, end in opening.items()}

    def update(self, version: int, outgoing: OutgoingWeights, targets: Mapping[str, BackBuffer | InPlace]) -> Outcome:
        """Send ``version``, and fill each target from the receiver of the same name."""
        outcome = Outcome()
        streamed = self.link.transport in STREAMED
        fills = {name: self.fill(name, version, target, None) for name, target in targets.items()} if streamed else {}
        try:
            outcome.stored = self.sender.send(version, outgoing)
        except Exception as error:
            outcome.sent = error
        if not streamed and outcome.stored is not None:
            fills = {name: self.fill(name, version, target, outcome.stored) for name, target in targets.items()}
        for name, fill in fills.items():
            try:
                outcome.reports[name] = fill.result(60)
            except Exception as error:
                outcome.errors[name] = error
        return outcome

    def fill(
        self, name: str, version: int, target: BackBuffer | InPlace, stored: StoredVersion | None
    ) -> Future[ReceiveReport]:
        return self._pool.submit(target.fill, version, arrival(self.receivers[name], version, stored))

    def close(self) -> None:
        self.sender.close()
        for receiver in self.receivers.values():
            receiver.close()


class Site:
    """Where ends meet: a directory, a store of objects, a store of addresses, and threads."""

    def __init__(self, directory: Path, pool: ThreadPoolExecutor) -> None:
        self.directory = directory
        self.pool = pool
        self.objects = Store()
        self._generation = 0
        self._open: list[Ends] = []

    @property
    def here(self) -> EndContext:
        return EndContext(HOST, self.objects.put, self.objects.fetch)

    @cached_property
    def _addresses(self) -> tuple[Any, int]:
        return open_store(HOST, 60.0)

    def link(
        self, transport: str, *names: str, timeout_s: float = 60.0, manifest: Manifest = MANIFEST, same: bool = False
    ) -> Link:
        """To a new rendezvous: the next generation, or the ``same`` one."""
        self._generation += not same
        address = (HOST, self._addresses[1]) if transport == "broadcast" else None
        return Link(
            transport,
            manifest,
            names,
            timeout_s,
            address=address,
            generation=self._generation,
            directory=self.directory,
        )

    def meet(
        self,
        transport: str,
        *names: str,
        timeout_s: float = 60.0,
        manifest: Manifest = MANIFEST,
        here: EndContext | None = None,
    ) -> Ends:
        link = self.link(transport, *names, timeout_s=timeout_s, manifest=manifest)
        ends = Ends(link, names, self.pool, here or self.here)
        self._open.append(ends)
        return ends

    def meet_within(self, timeout_s: float, transport: str, *names: str) -> Ends:
        """Meet with a time limit that is to pass later on: where a busy machine let it pass before, meet again."""
        for left in reversed(range(10)):
            try:
                return self.meet(transport, *names, timeout_s=timeout_s)
            except UpdateFailed as error:
                if not left or not re.search("waited|did not answer", str(error)):
                    raise
        raise AssertionError("the last try returns or raises")

    def close(self) -> None:
        for ends in self._open:
            ends.close()


@contextmanager
def site_in(directory: Path) -> Iterator[Site]:
    with ThreadPoolExecutor(4) as pool:
        site = Site(directory, pool)
        try:
            yield site
        finally:
            site.close()
