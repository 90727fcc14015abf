"""Attempt to bring a version to some receivers: what everybody answered, and what follows from that.

    somebody is gone                     ▶ lost; once more for the others, whose failures were its doing
    several are silent, trainer included ▶ machine by machine, or one by one: in a collective, one that does not come
                                           keeps all others waiting
    one is silent                        ▶ lost; those that have it keep it, once more for the rest
    somebody failed, everybody answered  ▶ once more for all; at the second time one that fails alone is lost, where
                                           who maps another's copy does not fail with it

A silent receiver is one that had not answered when the time was up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headway.data.interfaces.weights import ReceiveReport, SendReport
from headway.errors import UpdateFailed, UpdateMissed
from headway.pipeline.weight_receiver import ReceiverClient, Remote, WorkerUnavailable


@dataclass(frozen=True, slots=True)
class Audience:
    """Receivers that one attempt is for."""

    receivers: Sequence[ReceiverClient]
    failures: int = 0
    """Number of earlier attempts in a row, for just these receivers, that failed."""

    def still_there(self) -> Audience:
        return Audience([receiver for receiver in self.receivers if not receiver.is_gone], self.failures)


@dataclass(slots=True)
class Attempt:
    """Attempt to send a version, and who answered what; a receiver that did not answer is silent."""

    version: int
    audience: Audience
    limit: str
    """Description of the limit that it has, for messages."""
    began: float = 0.0
    """Time on the event clock at which sending began."""
    sent: SendReport | UpdateFailed | None = None
    received: dict[str, ReceiveReport | UpdateFailed | WorkerUnavailable] = field(default_factory=dict)
    """Answers by the receiver's name; silent receivers are missing."""

    @property
    def gone(self) -> list[WorkerUnavailable]:
        return [answer for answer in self.received.values() if isinstance(answer, WorkerUnavailable)]

    @property
    def silent(self) -> list[ReceiverClient]:
        return [receiver for receiver in self.audience.receivers if receiver.name not in self.received]

    @property
    def failed(self) -> dict[str, UpdateFailed]:
        """Map from a receiver's name to its error; one that holds something else than what was sent has failed, too."""
        errors = {name: self._error(name, answer) for name, answer in self.received.items()}
        return {name: error for name, error in errors.items() if error is not None}

    @property
    def holding(self) -> dict[ReceiverClient, ReceiveReport]:
        """Receivers that have the version, complete and equal to what was sent, with their reports."""
        if not isinstance(self.sent, SendReport):
            return {}
        answers = ((receiver, self.received.get(receiver.name)) for receiver in self.audience.receivers)
        failed = self.failed
        return {
            receiver: answer
            for receiver, answer in answers
            if isinstance(answer, ReceiveReport) and receiver.name not in failed
        }

    def without(self, receivers: Iterable[Remote]) -> list[ReceiverClient]:
        out = set(receivers)
        return [receiver for receiver in self.audience.receivers if receiver not in out]

    def _error(self, name: str, answer: ReceiveReport | UpdateFailed | WorkerUnavailable) -> UpdateFailed | None:
        if isinstance(answer, UpdateFailed):
            return answer
        if isinstance(answer, WorkerUnavailable) or not isinstance(self.sent, SendReport):
            return None
        sent = self.sent.checksums.get(name, self.sent.checksum)
        if answer.checksum == sent:
            return None
        return UpdateFailed(
            f"{name} received weights of version {self.version} with checksum {answer.checksum:08x}, the trainer sent "
            f"{sent:08x}"
        )


@dataclass(frozen=True, slots=True)
class RetryDecision:
    """Consequences of an attempt. A receiver that holds the version (`Attempt.holding`) and is not listed is done."""

    lost: Sequence[WorkerUnavailable] = ()
    again: Sequence[Audience] = ()
    reason: str = ""


def judge(attempt: Attempt) -> RetryDecision:
    """Decide what follows ``attempt``. Raises `UpdateFailed` where repeating it would not help."""
    if gone := attempt.gone:
        return _go_on_without(attempt, gone)
    if attempt.silent:
        return _judge_silence(attempt)
    if attempt.sent is None:
        raise UpdateFailed(_did_not_arrive(attempt))
    if attempt.failed or isinstance(attempt.sent, UpdateFailed):
        return _judge_failure(attempt)
    return RetryDecision()


def _judge_silence(attempt: Attempt) -> RetryDecision:
    silent, audience = attempt.silent, attempt.audience
    if len(silent) > 1 and not isinstance(attempt.sent, SendReport):
        return RetryDecision(again=_apart(audience), reason=_did_not_arrive(attempt))
    if len(audience.receivers) == 1 and isinstance(attempt.sent, UpdateFailed) and not audience.failures:
        return RetryDecision(again=[Audience(audience.receivers, failures=1)], reason=str(attempt.sent))
    return _go_on_without(
        attempt, [WorkerUnavailable(receiver, _did_not_answer(attempt, receiver)) for receiver in silent]
    )


def _apart(audience: Audience) -> list[Audience]:
    """Divide receivers that waited for each other: by the copies that they load from, or else one by one."""
    by_copy: dict[str, list[ReceiverClient]] = {}
    for receiver in audience.receivers:
        by_copy.setdefault(receiver.copy, []).append(receiver)
    if len(by_copy) > 1:
        return [Audience(receivers) for receivers in by_copy.values()]
    return [Audience([receiver]) for receiver in audience.receivers]


def _judge_failure(attempt: Attempt) -> RetryDecision:
    audience, failed = attempt.audience, attempt.failed
    # A receiver's error says more than the trainer's, which may only say that somebody gave up.
    error = next(iter(failed.values()), attempt.sent)
    assert isinstance(error, UpdateFailed)
    if not audience.failures:
        return RetryDecision(again=[Audience(audience.receivers, failures=1)], reason=str(error))
    own = {name for name, error in failed.items() if not isinstance(error, UpdateMissed)}
    alone = [receiver for receiver in audience.receivers if receiver.name in own or len(audience.receivers) == 1]
    if len(alone) != 1:
        raise error
    return _go_on_without(attempt, [WorkerUnavailable(alone[0], error)])


def _go_on_without(attempt: Attempt, gone: Sequence[WorkerUnavailable]) -> RetryDecision:
    rest = attempt.without([*(one.remote for one in gone), *attempt.holding])
    return RetryDecision(gone, [Audience(rest)] if rest else [], str(gone[0].why))


def _did_not_answer(attempt: Attempt, receiver: ReceiverClient) -> UpdateFailed:
    if isinstance(attempt.sent, UpdateFailed):
        return UpdateFailed(f"{receiver.name} did not receive version {attempt.version}: {attempt.sent}")
    trainer = "" if attempt.sent is not None else "; nor did the trainer, which was sending"
    return UpdateFailed(
        f"{receiver.name} did not answer within {attempt.limit} while it was receiving version "
        f"{attempt.version}{trainer}"
    )


def _did_not_arrive(attempt: Attempt) -> str:
    trainer = ["the trainer to send"] if attempt.sent is None else []
    waits = [*trainer, *(f"{receiver.name} to receive" for receiver in attempt.silent)]
    failure = f" ({attempt.sent})" if isinstance(attempt.sent, UpdateFailed) else ""
    return (
        f"the weights of version {attempt.version} did not arrive within {attempt.limit}: ParamUpdate waited for "
        f"{', '.join(waits)}{failure}"
    )
