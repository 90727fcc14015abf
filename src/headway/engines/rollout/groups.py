"""The groups that an engine has not finished, and how commands select among them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from headway.engines.rollout.work import GroupRun
from headway.interfaces import GenerateRequest, Priority


class Groups:
    """The groups of an engine, in order of submission. Training groups go by their numbers, which parts of a split
    group share.
    """

    def __init__(self) -> None:
        self._groups: list[GroupRun] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[GroupRun]:
        return iter(self._groups)

    def submit(
        self, requests: Iterable[GenerateRequest], check: Callable[[GenerateRequest, int], GroupRun]
    ) -> list[GroupRun]:
        """Take all of ``requests``, or none if ``check`` raises.

        ``check(request, serial)`` sets up a group whose trajectories are numbered from ``serial``.
        """
        groups, serial = [], self._serial
        for request in requests:
            groups.append(check(request, serial))
            serial += request.n
        self._serial = serial
        self._groups.extend(groups)
        return groups

    def remove(self, group: GroupRun) -> None:
        """Forget a group that is finished."""
        self._groups.remove(group)

    def clear(self) -> None:
        """Forget all groups: none will be finished any more."""
        self._groups.clear()

    def owners(self) -> list[Hashable]:
        """Owners of the groups, each one once."""
        return list(dict.fromkeys(group.owner for group in self._groups))

    def in_flight(self) -> list[int]:
        """Numbers of the training groups."""
        return _numbers(filter(_trains, self._groups))

    def older_than(self, version: int) -> list[int]:
        """Numbers of the training groups with a token of an older version."""
        groups = filter(_trains, self._groups)
        return _numbers(g for g in groups if g.oldest_version is not None and g.oldest_version < version)


def numbered(numbers: Sequence[int]) -> Callable[[GroupRun], bool]:
    """Tell whether a group is one of these training groups."""
    wanted = frozenset(numbers)
    return lambda group: _trains(group) and group.request.number in wanted


def owned_by(owner: Hashable) -> Callable[[GroupRun], bool]:
    """Tell whether ``owner`` submitted a group."""
    return lambda group: group.owner == owner


def _trains(group: GroupRun) -> bool:
    return group.request.priority is Priority.TRAINING


def _numbers(groups: Iterable[GroupRun]) -> list[int]:
    return list(dict.fromkeys(group.request.number for group in groups))  # two parts of a split group may be here
