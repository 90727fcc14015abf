"""The calls that an engine has not finished, and how commands select among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from headway.data.interfaces.generation import GenerateRequest
from headway.engines.rollout.call_run import CallRun
from headway.errors import DataError


class OpenCalls:
    """The open calls of an engine, by their client and its number for them."""

    def __init__(self) -> None:
        self._of: dict[str, dict[int, CallRun]] = {}
        self._serial = 0

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def __iter__(self) -> Iterator[CallRun]:
        return (run for runs in self._of.values() for run in runs.values())

    def submit(
        self, client: str, calls: Sequence[GenerateRequest], check: Callable[[GenerateRequest, int], CallRun]
    ) -> list[CallRun]:
        """Take all of ``calls``, or none if ``check`` raises.

        ``check(call, serial)`` sets up the ``serial``-th call of the engine. Raises `DataError` for a number that an
        open call of ``client`` has.
        """
        opened = self._of.get(client, {})
        runs = {call.number: check(call, serial) for serial, call in enumerate(calls, self._serial)}
        if len(runs) < len(calls) or not opened.keys().isdisjoint(runs):
            raise DataError(f"client {client} submitted a call under a number that another of its open calls has")
        self._serial += len(calls)
        self._of.setdefault(client, opened).update(runs)
        return list(runs.values())

    def remove(self, run: CallRun) -> None:
        """Forget a call that is finished."""
        del self._of[run.client][run.call.number]

    def find(self, client: str, numbers: Iterable[int]) -> list[CallRun]:
        """Calls of ``client`` with one of ``numbers``; unknown numbers are ignored."""
        opened = self._of.get(client, {})
        return [opened[number] for number in dict.fromkeys(numbers) if number in opened]

    def of(self, client: str) -> list[CallRun]:
        """Calls of ``client``, in order of submission."""
        return list(self._of.get(client, {}).values())

    def older_than(self, version: int) -> list[CallRun]:
        """Training calls with a token of an older version."""
        return [run for run in self if run.trains and run.oldest_version is not None and run.oldest_version < version]

    def forget(self, client: str) -> None:
        """Forget all calls of ``client``, which has left."""
        self._of.pop(client, None)

    def clear(self) -> None:
        """Forget all calls: none will be finished any more."""
        self._of.clear()
