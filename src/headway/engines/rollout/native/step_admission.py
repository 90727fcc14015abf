"""Admission of calls to a step, and contexts that starting calls need not prefill.

    StepAdmission   how many waiting calls start: as many as slots, memory and prefill budget allow
    KeptContexts    prefills that further calls will start from, and contexts between two calls of their episodes, in
                    memory that decoding rows leave

Rows come first: if they need the memory, blocks of contexts are evicted (see `prefix_cache`). An open episode is in a
row or in blocks. There is memory for one open episode per slot, unless ``rollout.kv_cache_gib`` gives less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.engines.rollout.native.model_runner import Prefilled
from headway.engines.rollout.native.prefix_cache import Found, PrefixCache
from headway.engines.rollout.scheduler import RequestState


def context_key(run: RequestState) -> bytes:
    """Return the key of a call's own context."""
    return run.request.input_ids.tobytes()


@dataclass(slots=True, eq=False)
class Share:
    """Calls that start in one step from the same context, which is prefilled at most once."""

    ids: NDArray[np.int64]
    """Tokens [P] of the context."""
    found: Found
    """Part of the context found in the prefix cache."""
    prefilled: Prefilled | None
    """Result for the whole context, from an earlier prefill or from this step; None before it has run."""
    runs: list[RequestState] = field(default_factory=list)
    missing: int = field(init=False)
    """Number of tokens to prefill."""

    def __post_init__(self) -> None:
        self.missing = 0 if self.prefilled is not None else len(self.ids) - self.found.length

    @property
    def shared(self) -> int:
        """Leading tokens whose keys and values all episodes will share; see `Found`."""
        return self.found.shared if self.found.shared < self.found.length else len(self.ids)


class KeptContexts:
    """Store of computed contexts from which later calls start.

    Waiting calls with the same context start from one prefill, with its logits. As calls start in order, usually one
    such prefill per priority is kept. There are more if calls of many contexts were submitted in turn; the oldest are
    dropped if they take too much memory. A tree of blocks keeps the contexts between two calls of an episode.
    """

    def __init__(self, tree: PrefixCache, most: int) -> None:
        """Set up. ``most``: most tokens of prefills to keep; a single context may be longer."""
        self.tree = tree
        """The contexts between two calls, and their episodes."""
        self._most = most
        self._waiting = Counter[bytes]()
        """Context -> number of calls that have not started."""
        self._prefills: dict[bytes, Prefilled] = {}
        """Context -> its prefill, oldest first."""
        self._running: dict[RequestState, int | None] = {}
        """Call of an open episode in a row -> number of its leading tokens that all episodes share; None if the context
        will not be kept."""

    # ------------------------------------------------------------------------------------- calls

    def expect(self, runs: Iterable[RequestState]) -> None:
        """Note that calls will start from their own contexts."""
        self._waiting.update(context_key(run) for run in runs)

    def drop_waiting(self, run: RequestState) -> None:
        """Note that a call has started or never will."""
        key = context_key(run)
        self._waiting[key] -= 1
        if not self._waiting[key]:
            del self._waiting[key]
            self._prefills.pop(key, None)

    def share(self, run: RequestState, ids: NDArray[np.int64], found: Found) -> Share:
        """Make a share for ``run``, whose context is ``ids`` [P], with the prefill kept for it if there is one."""
        # What others had prefilled has no bit of what the call's episode sampled before.
        kept = run.started is None and found.shared == found.length
        return Share(ids, found, self._prefills.get(context_key(run)) if kept else None)

    def start(self, share: Share) -> None:
        """Note that the calls of ``share`` have rows and start from its prefill. Keep a copy for waiting calls."""
        assert share.prefilled is not None
        for run in share.runs:
            if run.started is None:
                run.cached = len(share.ids) - (share.missing if run is share.runs[0] else 0)
                self.drop_waiting(run)
            if run.request.goes_on or run.request.trajectory in self.tree.episodes:
                self._running[run] = share.shared if run.request.goes_on else None
                self.tree.begin(run.request.trajectory, run.client)
        key = context_key(share.runs[0])
        if share.runs[0].started is not None or share.shared < len(share.ids):  # only its episode may see these bits
            return
        if key not in self._waiting or key in self._prefills:
            return
        self._prefills[key] = share.prefilled.copy()  # with its own memory: a view would keep the whole step's
        while len(self._prefills) > 1 and sum(kept.kv.shape[2] for kept in self._prefills.values()) > self._most:
            del self._prefills[next(iter(self._prefills))]

    def end(self, run: RequestState) -> int | None:
        """Note that a call loses its row. Returns the number of leading tokens of its context that all episodes share,
        or None if the context is not kept.
        """
        if run not in self._running:
            return None
        self.tree.end(run.request.trajectory)
        return self._running.pop(run)

    def clear(self, *, in_place: bool = False) -> None:
        """Drop everything. ``in_place``: open episodes keep their contexts, although the weights are new."""
        self._prefills.clear()
        if in_place:
            self.tree.renew()
        else:
            self.tree.clear()


@dataclass(slots=True, kw_only=True)
class StepAdmission:
    """Decides which waiting calls start in one step. Call it for each in order, until it refuses one."""

    rows: int
    """Number of decoding rows plus admitted calls."""
    positions: int
    """Number of positions of the longest row, its next token included."""
    budget: int
    """Most tokens that the step may still prefill; a single context may be longer."""
    fits: Callable[[int, int], bool]
    """Function of (rows, positions) that tells whether the KV cache has memory for them."""
    contexts: KeptContexts
    """Contexts that calls need not prefill."""
    shares: dict[Hashable, Share] = field(default_factory=dict)
    """Key -> admitted calls: (`context_key`, cached blocks) for calls that start anew, the call itself if parked."""

    @property
    def starting(self) -> list[RequestState]:
        """Return the admitted calls in the order of their rows: calls of a share are neighbours."""
        return [run for share in self.shares.values() for run in share.runs]

    def __call__(self, run: RequestState) -> bool:
        """Tell whether ``run`` also starts."""
        ids = run.context
        # At most up to the last token, whose logits are wanted.
        found = self.contexts.tree.find(ids[:-1], run.request.trajectory)
        key = (context_key(run), found.blocks) if run.started is None else run
        share = self.shares.get(key) or self.contexts.share(run, ids, found)
        missing = 0 if share.runs else share.missing
        # The first one starts whatever its length: a context above the budget would otherwise wait for ever.
        if self.shares and missing > self.budget:
            return False
        positions = max(self.positions, len(ids) + 1)
        if not self.fits(self.rows + 1, positions):
            return False
        self.shares[key] = share
        share.runs.append(run)
        self.budget -= missing
        self.rows, self.positions = self.rows + 1, positions
        return True
