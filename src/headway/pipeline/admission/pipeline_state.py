"""State that the stages share: the counters of admission, the ledger, and where the trainer stands.

    admit ─▶ rewarded ─▶ taken ─▶ consume(trained, or dropped for a step that is not finite)
       └──────────┴─▶ discard(filtered, dropped, failed), drop_unscored

Every change of a group's life goes through here, so that counters, ledger and events cannot disagree.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from typing import Any

from headway.data.types import Prompt
from headway.errors import LedgerImbalance, NothingToTrain
from headway.events import Emit, GroupAdmitted, GroupSettled, Note
from headway.pipeline.admission.ledger import (
    DISCARDED_VERSIONS,
    FAILED_AT_FIRST,
    Ends,
    Fate,
    Ledger,
    all_discarded,
    cannot_be_scored,
)
from headway.pipeline.admission.message_queue import MessageQueue
from headway.pipeline.admission.run_journal import RunJournal
from headway.pipeline.admission.sample_collector import DrawnGroup, Samples
from headway.pipeline.admission.staleness import Staleness
from headway.pipeline.stage import Signal


@dataclass(slots=True)
class RunState:
    """Bookkeeping of one run. ``consumed`` counts groups taken into batches that ended; version = ⌊consumed / B⌋."""

    staleness: Staleness
    ledger: Ledger
    queue: MessageQueue
    emit: Emit
    consumed: int = 0
    in_training: int = 0
    """Number of groups that were taken into batches which have not ended."""
    data_ended: bool = False
    """True once the data ended within a version; that version, though short of groups, counts as one."""
    gave_up: bool = False
    """True once a stop has given up the version that was begun, because its groups do not come in time."""
    waiting_again: deque[Prompt] = field(default_factory=deque)
    """Prompts whose groups a resumed run lost; admitted again, before any new one."""
    validating: set[str] = field(default_factory=set)
    """Names of the replicas whose validation is submitted or running."""
    changed: Signal = field(default_factory=Signal)
    """Signal that fires when anything changed that admission or an update may wait for."""
    stopping: bool = False
    """True once the run was asked to end at the next version boundary."""
    hurried: bool = False
    """True once the user asked for the end: nothing new is begun."""
    admits: bool = True
    """False once no further group is admitted, not even in the place of one that was discarded."""
    stop_reason: str | None = None
    """Reason why the run stops itself; None where the request came from outside."""
    samples: Samples | None = None
    """Samples of drawn groups; None where none are drawn."""
    journal: RunJournal | None = None
    """Journal of what is finished; None where the run keeps none."""
    reopened: dict[tuple[int, int, int], tuple[int, Prompt]] = field(default_factory=dict)
    """Numbers and prompts of the groups that were open at the checkpoint and are to be made again, by identity."""
    _unrewarded: set[int] = field(default_factory=set)
    _discarded_in_row: Ends = field(default_factory=Counter)
    """Number of groups by (fate, reason) that were discarded since a group last passed Reward."""
    _scored: bool = False
    """True once the reward of some group could be computed."""

    @property
    def at_boundary(self) -> bool:
        return self.consumed % self.staleness.groups_per_version == 0

    @property
    def version(self) -> int:
        """Version of the policy that the trainer holds."""
        return self.consumed // self.staleness.groups_per_version + (self.data_ended and not self.at_boundary)

    @property
    def taken(self) -> int:
        """Number of groups that were taken into batches, ended or not."""
        return self.consumed + self.in_training

    @property
    def took_version(self) -> bool:
        """True while all groups that the trainer's version trains on are taken, and not all of them consumed."""
        return self.taken // self.staleness.groups_per_version > self.consumed // self.staleness.groups_per_version

    @property
    def unrewarded(self) -> int:
        """Number of admitted groups that have not passed Reward."""
        return len(self._unrewarded)

    @property
    def unfinished(self) -> bool:
        """True when the run gave up between two versions: only some groups of a version were trained on."""
        return self.gave_up and (self.in_training > 0 or not (self.at_boundary or self.data_ended))

    @property
    def trains_more(self) -> bool:
        """False once all groups of the run are consumed, or the rest is given up."""
        total = self.staleness.total
        return not self.data_ended and not self.gave_up and (total is None or self.consumed < total)

    @property
    def all_admitted(self) -> bool:
        """True when the run needs no further group, unless one is discarded."""
        staleness = self.staleness
        return staleness.total is not None and staleness.admitted - staleness.discarded >= staleness.total

    def state(self) -> dict[str, Any]:
        """Return the run state's part of a checkpoint, at a version boundary, where no group is in a batch."""
        return {
            "version": self.version,
            "consumed": self.consumed,
            "data_ended": self.data_ended,
            "admitted": self.staleness.admitted,
            "discarded": self.staleness.discarded,
            "eta_now": str(self.staleness.eta_now),
            "ledger": self.ledger.state(),
            "again": [[p.epoch, p.row, p.attempt] for p in self.waiting_again],
            "live": [[number, version] for number, version in sorted(self.queue.live.items())],
            "made": sorted(number for number, group in self.ledger.open.items() if group.made),
            "scored": sorted(number for number, group in self.ledger.open.items() if group.scored),
            "journal": None if self.journal is None else self.journal.run,
        }

    def restore(
        self, state: Mapping[str, Any], *, open_prompts: Sequence[Prompt], again: Sequence[Prompt], eta_now: Fraction
    ) -> None:
        """Begin at the boundary where `state` was taken.

        With a journal, groups that were open then are made again under their numbers, and what was finished of them
        comes from there. Without one they are ``dropped(resume)``, and their prompts come back in order, behind those
        (``again``) that were waiting already.
        """
        numbers = [number for number, *_ in state["ledger"]["open"]]
        reopened = dict(zip(numbers, open_prompts, strict=True)) if self._reopens(state) else {}
        self.consumed, self.data_ended = state["consumed"], state["data_ended"]
        self.ledger.restore(state["ledger"], dict(zip(numbers, open_prompts, strict=True)))
        # Else 32 failures right after a resume would end a run whose reward has worked before.
        self._scored = any(self.ledger.counts()[fate] for fate in (Fate.TRAINED, Fate.FILTERED))
        self.staleness.restore(
            version=state["version"],
            admitted=state["admitted"],
            # Open groups that are not made again end below, in the ledger alone: here they are counted for admission.
            discarded=state["discarded"] + len(numbers) - len(reopened),
            eta_now=eta_now,
        )
        live = dict(state["live"]) if reopened else {}
        self.queue.restore(admitted=state["admitted"], taken=self.consumed, live=live)
        for number, prompt in reopened.items():
            self.reopened[prompt.group_id] = number, prompt
            self._draw(number)
        if reopened:
            for number, group in self.ledger.open.items():
                group.made, group.scored = number in state["made"], number in state["scored"]
        else:
            again = [*again, *open_prompts]
            for number in numbers:
                self._settle(number, Fate.DROPPED, "resume")
        self.waiting_again.extend(again)
        self.check_balance()

    def _reopens(self, state: Mapping[str, Any]) -> bool:
        """Read the journal. Returns True if open groups continue from it: it is this run's, with their settings."""
        if self.journal is None:
            return False
        self.journal.restore(state["consumed"], state.get("journal"), self.note)
        if (why := self.journal.left_out) is not None:
            self.note(f"groups that were open are dropped, and their prompts sampled again: {why}")
        return why is None

    def admit(self, prompt: Prompt) -> int | None:
        """Admit a group for ``prompt``, counted against the inequality. Returns its number, the one from before for a
        group that was open at the checkpoint; None for a group that the journal says was not trained on: it ends at
        once.
        """
        known = self.reopened.pop(prompt.group_id, None)
        number = self._admit(prompt) if known is None else known[0]
        return None if self._ended_before(number, prompt.group_id) else number

    def _admit(self, prompt: Prompt) -> int:
        number = self.ledger.admit(prompt)
        limit = self.staleness.limit
        self.staleness.admit()
        # By the version served now: what replicas load later only makes its tokens newer.
        self.queue.expect(number, self.staleness.served_version)
        self._draw(number)
        self.emit(
            GroupAdmitted(
                time=now(),
                number=number,
                epoch=prompt.epoch,
                row=prompt.row,
                attempt=prompt.attempt,
                version=self.staleness.served_version,
                admitted=self.staleness.admitted,
                discarded=self.staleness.discarded,
                limit=limit,
                source=prompt.source,
            )
        )
        return number

    def _draw(self, number: int) -> None:
        self._unrewarded.add(number)
        if self.samples is not None and self.samples.draws(number):
            self.ledger.open[number].drawn = DrawnGroup(now())

    def rewarded(self, number: int) -> None:
        """Note that a group passed Reward and moves to the queue."""
        self._scored = True
        self._discarded_in_row.clear()
        self._unrewarded.discard(number)
        self._wake()

    def _ended_before(self, number: int, group: tuple[int, int, int]) -> bool:
        """End a group that was not trained on according to the journal; return False for any other. Filtered groups
        are scored and filtered again.
        """
        end = None if self.journal is None else self.journal.end(number, group)
        if end is None:
            return False
        fate, reason, failed = end
        # The checkpoint's ledger may have some of them.
        self.ledger.episodes_failed(number, failed - self.ledger.open[number].failed)
        # Not `discard`: it says so already, and what once failed in a row must not end the resumed run, too.
        self._end_early(number, fate, reason)
        return True

    def discard(self, number: int, fate: Fate, reason: str) -> None:
        """End a group that was not taken into a batch; its place under the inequality is free again.

        Raises `NothingToTrain` after 10·B discards in a row, and after 32 failures when the reward never worked.
        """
        if self.journal is not None and fate is not Fate.FILTERED:
            group = self.ledger.open[number]
            # Before it ends here: a process killed in between would else make the group again.
            self.journal.ended(number, group.prompt.group_id, fate, reason, group.failed)
        self._end_early(number, fate, reason)
        self._scored |= fate is Fate.FILTERED  # a filtered group has scores: the reward works
        self._discarded_in_row[fate, reason] += 1
        if self._discarded_in_row.total() >= DISCARDED_VERSIONS * self.staleness.groups_per_version:
            raise all_discarded(self._discarded_in_row)
        failed = [why for end, why in self._discarded_in_row.elements() if end is Fate.FAILED]
        if not self._scored and fate is Fate.FAILED and len(failed) >= FAILED_AT_FIRST:
            raise NothingToTrain(cannot_be_scored(f"the first {FAILED_AT_FIRST} groups", failed))

    def drop_unscored(self, number: int, reason: str) -> None:
        """Drop a group because its scores are no longer waited for. Does not count as a failure of the reward."""
        self._end_early(number, Fate.DROPPED, reason)

    def give_up_version(self) -> None:
        """Train on nothing more after a stop, when no further group will be scored, unless the groups scored so far are
        enough for the version.
        """
        self._give_up_unless(len(self.ledger.open) - self.unrewarded - self.in_training)

    def admit_no_more(self) -> None:
        """Admit no further group, and give up the version that was begun if the open groups are not enough for it."""
        self.admits = False
        self._give_up_unless(len(self.ledger.open) - self.in_training)

    def give_up(self) -> None:
        """Train on nothing more."""
        self.gave_up = True
        self.queue.abandon()
        self._wake()

    def _give_up_unless(self, groups: int) -> None:
        """Train on nothing more, unless that number of ``groups`` is enough for the rest of the run."""
        if (self.staleness.total or 0) - self.taken > groups:
            self.give_up()

    def consume(self, number: int, fate: Fate, reason: str | None = None, lag: int | None = None) -> None:
        """End a group that was taken into a batch; trained on or not, it counts as consumed."""
        # Before the counters: a sample has the version that trained the group, not the next one.
        self._settle(number, fate, reason, lag)
        self.in_training -= 1
        self.consumed += 1
        if self.at_boundary:
            self._wake()

    def load(self, replica: str, version: int) -> None:
        """Note that ``replica`` serves ``version`` from now on."""
        self.staleness.load(replica, version)
        self.queue.look_again()
        self._wake()

    def unload(self, replica: str) -> None:
        """Forget a ``replica`` that is gone: it validates nothing, and the oldest version served may grow."""
        self.staleness.unload(replica)
        self.validation(replica, running=False)

    def validation(self, replica: str, *, running: bool) -> None:
        if running:
            self.validating.add(replica)
        else:
            self.validating.discard(replica)
        self._wake()

    def check_balance(self) -> None:
        """Raise `LedgerImbalance` unless the ledger and the counters of admission agree."""
        counts, staleness = self.ledger.counts(), self.staleness
        settled = self.ledger.admitted - counts[Fate.IN_FLIGHT]
        if self.ledger.admitted != staleness.admitted or settled != self.consumed + staleness.discarded:
            raise LedgerImbalance(
                f"the books do not balance: ledger {counts}; admission counted {staleness.admitted} admitted and "
                f"{staleness.discarded} discarded, training {self.consumed} consumed. "
                "This is a defect of Headway: please report it with the run's events.jsonl"
            )

    def leave_open_in_flight(self) -> None:
        """Note that the run ends: groups without a fate count as ``in_flight``."""
        # A copy: settling takes each one out of the ledger.
        for number in sorted(self.ledger.open):
            self._settle(number, Fate.IN_FLIGHT, None)

    def request_stop(self, reason: str | None = None) -> None:
        """Request the end at the next version boundary, to which the run's total shrinks. A pending batch is abandoned.

        ``reason``: why the run stops itself; the first reason given is kept.
        """
        self.stopping = True
        self.stop_reason = self.stop_reason or reason
        taken, per_version = self.taken, self.staleness.groups_per_version
        boundary = ceil(taken / per_version) * per_version
        self.staleness.total = boundary if self.staleness.total is None else min(boundary, self.staleness.total)
        # Nothing of the next version is begun: a trainer that waits for its first batch would wait for ever.
        if taken == boundary:
            self.queue.abandon()
        self._wake()

    def _end_early(self, number: int, fate: Fate, reason: str) -> None:
        self._settle(number, fate, reason)
        self._unrewarded.discard(number)
        self.queue.discard(number)
        self.staleness.discard()
        if not self.admits:
            self._give_up_unless(len(self.ledger.open) - self.in_training)
        self._wake()

    def _settle(self, number: int, fate: Fate, reason: str | None, lag: int | None = None) -> None:
        # Before it is settled, which takes the entry out of the ledger.
        entry = self.ledger.open.get(number)
        self.ledger.settle(number, fate)
        ended: dict[str, Any] = {"time": now(), "fate": fate.value, "reason": reason, "lag": lag}
        self.emit(GroupSettled(number=number, **ended))
        if self.samples is not None and entry is not None and entry.drawn is not None:
            self.samples.settled(number, entry.prompt, entry.drawn, version=self.version, **ended)

    def note(self, text: str, level: str = "warning") -> None:
        """Tell the user ``text``."""
        self.emit(Note(time=now(), level=level, text=text))

    def _wake(self) -> None:
        self.changed.changed()


def now() -> float:
    """Seconds on the event clock, that of the running event loop, real or virtual."""
    return asyncio.get_running_loop().time()
