"""Proxies of workers as the protocols that their roles keep, so that mypy checks the names and arguments of calls.

engine = proxy(worker, RolloutEngine, part="engine")
await engine.pause(OnUpdate.DRAIN)                      # worker.call("engine.pause", OnUpdate.DRAIN)
critic = proxy(ranks, CriticEngine, train_step="critic_step")
await critic.train_step(samples)                        # ranks.call("critic_step", samples)
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar, cast

P = TypeVar("P")


class Callee(Protocol):
    """Object with a ``call`` method: a `Worker`, or a `WorkerGroup`."""

    def call(self, method: str, *args: Any) -> Awaitable[Any]: ...


def proxy(callee: Callee, protocol: type[P], *, part: str | None = None, **names: str) -> P:
    """Return ``callee`` as a ``protocol``, a class or a Protocol: each of its coroutine methods is a call, by position.

    Attributes and other methods are not there.

    Args:
        part: the part of the role that has the methods.
        names: what the role calls a method, where the protocol has another name for it.
    """
    methods = [name for name, _ in inspect.getmembers(protocol, inspect.iscoroutinefunction)]
    prefix = f"{part}." if part else ""
    calls = {name: partial(callee.call, prefix + names.get(name, name)) for name in methods}
    return cast(P, SimpleNamespace(**calls))
