"""State of a receiver of weights: the version that arrives, and the version that is served. Every engine has one."""

from __future__ import annotations

from enum import StrEnum
from threading import Lock

from headway.errors import RunError, UpdateFailed


class Held(StrEnum):
    """Progress of the newest version at a receiver."""

    ABSENT = "absent"
    """No part of it is here, or no longer."""
    ARRIVING = "arriving"
    """Another thread receives it."""
    COMPLETE = "complete"
    """All of it is here, and checked."""
    LOADING = "loading"
    """It is written over the served weights."""
    LOADED = "loaded"
    """It is what is served."""


class ReceiverState:
    """State machine of a receiver: its newest version, and the version that it serves. Thread-safe.

        LOADED ─begin─▶ ARRIVING ─complete─▶ COMPLETE ─begin_load─▶ LOADING ─loaded─▶ LOADED ─begin─▶ …
                           │                    ▲                      │
                           └─fail─▶ ABSENT      └──────fail_load───────┘

    One version at a time: while one arrives, or is loaded, a call that begins another is refused.

    Example:
        >>> state = ReceiverState("replica 0")
        >>> state.begin(1)
        >>> state.complete()
        >>> state.held, state.served  # the old version serves on
        (<Held.COMPLETE: 'complete'>, 0)
        >>> state.begin_load(1, staged=1)
        >>> state.loaded()
        >>> state.served
        1
    """

    def __init__(self, name: str = "the receiver", *, in_place: bool = False) -> None:
        """Serve version 0. Messages call the receiver ``name``. ``in_place``: versions arrive over the served one."""
        self.name = name
        self.in_place = in_place
        self.held = Held.LOADED
        self.version = 0
        """The version that `held` refers to."""
        self.served: int | None = 0
        """The complete version that may be computed with; None while there is none."""
        self.problem: str | None = None
        """Reason why no version is served, and what to do; None if one is."""
        self._lock = Lock()
        self._before: tuple[Held, int, int | None, str | None] = (self.held, self.version, self.served, self.problem)

    @property
    def staged(self) -> int | None:
        """The version that is complete and not loaded yet."""
        return self.version if self.held in (Held.COMPLETE, Held.LOADING) else None

    def begin(self, version: int) -> None:
        """Note that ``version`` arrives from now on. Raises `UpdateFailed` while another one arrives or is loaded."""
        with self._lock:
            self._check_idle(f"receiving version {version}")
            # Before anything changes: `fail` brings this back where nothing was written.
            self._before = (self.held, self.version, self.served, self.problem)
            self.held, self.version = Held.ARRIVING, version
            if self.in_place:
                self._serve_none(
                    f"version {version} is being written over its weights; wait for stage_weights to return"
                )

    def complete(self) -> None:
        """Note that all of the version is here, and checked."""
        if self.in_place:
            self.problem = (
                f"its weights are version {self.version}'s, which is not active; call activate({self.version})"
            )
        self.held = Held.COMPLETE

    def fail(self, *, torn: bool = False) -> None:
        """Note that the version will not come. ``torn``: a part of it was written over the served weights."""
        with self._lock:
            self.held = Held.ABSENT
            if torn:
                self.tear()
            elif self.in_place:  # nothing was written: all is as it was
                self.held, self.version, self.served, self.problem = self._before

    def begin_load(self, version: int, staged: int | None) -> None:
        """Note that ``version`` is loaded from now on.

        Raises `UpdateFailed`, changing nothing, unless it is the one that is ``staged``, and while another one arrives.
        """
        with self._lock:
            self._check_idle(f"loading version {version}")
            if staged != version:
                why = f"{'nothing' if staged is None else f'version {staged}'} is staged; stage that version first"
                if staged is None and self.problem is not None:
                    why = self.problem
                raise UpdateFailed(f"{self.name} cannot activate version {version}: {why}")
            self.held = Held.LOADING

    def tear(self) -> None:
        """Note that the served weights are overwritten from now on: no complete version is served until `loaded`."""
        self._serve_none(
            f"its weights are torn: only a part of version {self.version} was written over them; "
            "stage and activate a whole version first"
        )

    def loaded(self) -> None:
        """Note that the version is served."""
        self.held, self.served, self.problem = Held.LOADED, self.version, None

    def fail_load(self) -> None:
        """Note that the version was not loaded. It is still here."""
        self.held = Held.COMPLETE

    def lose_served(self) -> None:
        """Note that the memory of the served weights was given up."""
        self._serve_none("its weights were given up when it was put to sleep; stage and activate a version first")
        if self.in_place:
            self.held = Held.ABSENT

    def check(self, doing: str) -> None:
        """Raise `RunError`, which says what could not be done (``doing``), unless one whole version is served."""
        if self.problem is not None:
            raise RunError(f"{self.name} cannot {doing}: {self.problem}")

    def check_unwritten(self, doing: str) -> None:
        """Raise `RunError`, which says what could not be done (``doing``), while another thread writes the weights."""
        if self.in_place and self.held is Held.ARRIVING:
            self.check(doing)

    def _serve_none(self, problem: str) -> None:
        self.served, self.problem = None, problem

    def _check_idle(self, doing: str) -> None:
        if self.held in (Held.ARRIVING, Held.LOADING):
            now = "receiving" if self.held is Held.ARRIVING else "loading"
            raise UpdateFailed(f"{self.name} is still {now} version {self.version}; {doing} has to wait for that")
