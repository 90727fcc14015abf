"""State that the stages share: the admission counters, the ledger, and the trainer's progress.

    admit ─▶ rewarded ─▶ taken ─▶ consume(trained, or dropped for a step that is not finite)
       └──────────┴─▶ discard(filtered, dropped, failed), drop_unscored

Every change of a group's state is made here, so that counters, ledger and events cannot disagree.
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
    """Number of groups in batches that have not ended."""
    data_ended: bool = False
    """True once the data ended within a version. That version counts, though it is short of groups."""
    gave_up: bool = False
    """True once a stop gave up the current version, because its groups do not come in time."""
    waiting_again: deque[Prompt] = field(default_factory=deque)
    """Prompts whose groups were lost when the run was resumed. They are admitted again before any new prompt."""
    validating: set[str] = field(default_factory=set)
    """Names of the replicas with a validation that is submitted or running."""
    changed: Signal = field(default_factory=Signal)
    """Signal that fires when any state changed that admission or an update may wait for."""
    stopping: bool = False
    """True once the run is to end at the next version boundary."""
    hurried: bool = False
    """True once the user requested the end: nothing new is begun."""
    admits: bool = True
    """False once no further group is admitted, not even to replace a discarded one."""
    stop_reason: str | None = None
    """Reason why the run stops itself; None if it does not, or if the user requested the stop."""
    samples: Samples | None = None
    """Samples of drawn groups; None if the run takes none."""
    journal: RunJournal | None = None
    """Journal of finished work; None if the run keeps none."""
    reopened: dict[tuple[int, int, int], tuple[int, Prompt]] = field(default_factory=dict)
    """Identity -> number and prompt of each group that was open at the checkpoint and is to be made again."""
    _unrewarded: set[int] = field(default_factory=set)
    _discarded_in_row: Ends = field(default_factory=Counter)
    """(fate, reason) -> number of groups discarded since a group last passed Reward."""
    _scored: bool = False
    """True once the reward of any group could be computed."""

    @property
    def at_boundary(self) -> bool:
        return self.consumed % self.staleness.groups_per_version == 0

    @property
    def version(self) -> int:
        """Version of the policy that the trainer holds."""
        return self.consumed // self.staleness.groups_per_version + (self.data_ended and not self.at_boundary)

    @property
    def taken(self) -> int:
        """Number of groups taken into batches, whether the batches have ended or not."""
        return self.consumed + self.in_training

    @property
    def took_version(self) -> bool:
        """True while all groups of the trainer's version are taken, but not all of them are consumed."""
        return self.taken // self.staleness.groups_per_version > self.consumed // self.staleness.groups_per_version

    @property
    def unrewarded(self) -> int:
        """Number of admitted groups that have not passed Reward."""
        return len(self._unrewarded)

    @property
    def unfinished(self) -> bool:
        """True if the run gave up within a version, of which only some groups were trained on."""
        return self.gave_up and (self.in_training > 0 or not (self.at_boundary or self.data_ended))

    @property
    def trains_more(self) -> bool:
        """True until all groups of the run are consumed or the rest is given up."""
        total = self.staleness.total
        return not self.data_ended and not self.gave_up and (total is None or self.consumed < total)

    @property
    def all_admitted(self) -> bool:
        """True if the run needs no further group, unless one is discarded."""
        staleness = self.staleness
        return staleness.total is not None and staleness.admitted - staleness.discarded >= staleness.total

    def state(self) -> dict[str, Any]:
        """Return the run state's part of a checkpoint. Call it at a version boundary, where no group is in a batch."""
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
        """Begin at the version boundary where ``state`` was taken.

        With a journal, groups that were open then are made again under their numbers, and their finished parts are read
        from it. Without one they are ``dropped(resume)``, and their prompts are admitted again in order, behind the
        prompts that were waiting already (``again``).
        """
        numbers = [number for number, *_ in state["ledger"]["open"]]
        reopened = dict(zip(numbers, open_prompts, strict=True)) if self._reopens(state) else {}
        self.consumed, self.data_ended = state["consumed"], state["data_ended"]
        self.ledger.restore(state["ledger"], dict(zip(numbers, open_prompts, strict=True)))
        # Otherwise 32 failures right after a resume would end a run whose reward has worked before.
        self._scored = any(self.ledger.counts()[fate] for fate in (Fate.TRAINED, Fate.FILTERED))
        self.staleness.restore(
            version=state["version"],
            admitted=state["admitted"],
            # Admission counts open groups that are not made again as discarded here; the ledger ends them below.
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
        """Read the journal. Returns True if open groups continue from it: it belongs to this run, and their settings
        match.
        """
        if self.journal is None:
            return False
        self.journal.restore(state["consumed"], state.get("journal"), self.note)
        if (why := self.journal.left_out) is not None:
            self.note(f"groups that were open are dropped, and their prompts sampled again: {why}")
        return why is None

    def admit(self, prompt: Prompt) -> int | None:
        """Admit a group for ``prompt``, counted against the inequality. Returns its number; a group that was open at
        the checkpoint keeps its number. Returns None if the group ends at once, since by the journal it was not trained
        on.
        """
        known = self.reopened.pop(prompt.group_id, None)
        number = self._admit(prompt) if known is None else known[0]
        return None if self._ended_before(number, prompt.group_id) else number

    def _admit(self, prompt: Prompt) -> int:
        number = self.ledger.admit(prompt)
        limit = self.staleness.limit
        self.staleness.admit()
        # By the version served now: later versions only make the group's tokens newer.
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
        """End a group that was not trained on according to the journal. Returns False for any other group. Filtered
        groups are scored and filtered again.
        """
        end = None if self.journal is None else self.journal.end(number, group)
        if end is None:
            return False
        fate, reason, failed = end
        # The checkpoint's ledger may contain some of these episodes.
        self.ledger.episodes_failed(number, failed - self.ledger.open[number].failed)
        # Not `discard`: the journal has this end already, and failures in a row before must not end the resumed run,
        # too.
        self._end_early(number, fate, reason)
        return True

    def discard(self, number: int, fate: Fate, reason: str) -> None:
        """End a group that was not taken into a batch; its place under the inequality is free again.

        Raises `NothingToTrain` after 10·B discards in a row, and after 32 failures when the reward never worked.
        """
        if self.journal is not None and fate is not Fate.FILTERED:
            group = self.ledger.open[number]
            # Before the group ends here: otherwise a process killed in between would make the group again.
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
        """Drop a group whose scores are no longer awaited. Does not count as a failure of the reward."""
        self._end_early(number, Fate.DROPPED, reason)

    def give_up_version(self) -> None:
        """Give up the current version after a stop, when no further group will be scored, unless the groups scored so
        far complete it.
        """
        self._give_up_unless(len(self.ledger.open) - self.unrewarded - self.in_training)

    def admit_no_more(self) -> None:
        """Admit no further group. Give up the current version if the open groups do not complete it."""
        self.admits = False
        self._give_up_unless(len(self.ledger.open) - self.in_training)

    def give_up(self) -> None:
        """Train on nothing more."""
        self.gave_up = True
        self.queue.abandon()
        self._wake()

    def _give_up_unless(self, groups: int) -> None:
        """Train on nothing more, unless ``groups``, a number, is enough for the rest of the run."""
        if (self.staleness.total or 0) - self.taken > groups:
            self.give_up()

    def consume(self, number: int, fate: Fate, reason: str | None = None, lag: int | None = None) -> None:
        """End a group that was taken into a batch. It counts as consumed, whether trained on or not."""
        # Before the counters change: a sample names the version that trained the group, not the next one.
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
        """Forget a lost ``replica``: its validation ends, and the oldest version served may increase."""
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
        """Settle all open groups as ``in_flight``, at the end of the run."""
        # Iterate over a copy: settling removes each group from the ledger.
        for number in sorted(self.ledger.open):
            self._settle(number, Fate.IN_FLIGHT, None)

    def request_stop(self, reason: str | None = None) -> None:
        """Request the end at the next version boundary, and shrink the run's total to it. A pending batch is abandoned.

        ``reason``: why the run stops itself; None for the user's request. The first reason is kept.
        """
        self.stopping = True
        self.stop_reason = self.stop_reason or reason
        taken, per_version = self.taken, self.staleness.groups_per_version
        boundary = ceil(taken / per_version) * per_version
        self.staleness.total = boundary if self.staleness.total is None else min(boundary, self.staleness.total)
        # Nothing of the next version has begun: a trainer that waits for its first batch would wait for ever.
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
        # Before the group is settled, which removes its entry from the ledger.
        entry = self.ledger.open.get(number)
        self.ledger.settle(number, fate)
        ended: dict[str, Any] = {"time": now(), "fate": fate.value, "reason": reason, "lag": lag}
        self.emit(GroupSettled(number=number, **ended))
        if self.samples is not None and entry is not None and entry.drawn is not None:
            self.samples.settled(number, entry.prompt, entry.drawn, version=self.version, **ended)

    def note(self, text: str, level: str = "warning") -> None:
        """Show ``text`` to the user."""
        self.emit(Note(time=now(), level=level, text=text))

    def _wake(self) -> None:
        self.changed.changed()


def now() -> float:
    """Return the time on the event clock in seconds. It is the running event loop's clock, real or virtual."""
    return asyncio.get_running_loop().time()
