"""One episode of a program: turns, limits, and the log of calls from which it can be made again.

    program ──TurnRequest──▶ limits ▶ tokens.prompt ▶ known in the log? ─no─▶ a call of the policy
       ▲                                                   │ yes                     │
       └────────────── TurnAnswer ◀── tokens.answered ◀────┴─────────────────────────┘

If a worker dies, its programs run again from the beginning. The log answers known calls. Requests that differ from
before are sampled anew, and calls that are not asked for again are not trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from headway.agents.episodes.episode_attempt import CallLog, EpisodeAttempt
from headway.agents.episodes.episode_limits import EpisodeClock, EpisodeLimits, EpisodeTime
from headway.agents.episodes.episode_tokens import EpisodeTokens, spans_of
from headway.agents.interface.program_chat import Ask
from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart, TurnAnswer, TurnRequest
from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import Completion, Priority, SamplingParams
from headway.data.tokenize import template_kwargs
from headway.data.types import FinishReason, RowAt, RowTokens, Trajectory, TrajectoryId
from headway.errors import EpisodeOver, HeadwayError, ProgramAway, ProgramFailed, RunError, RunnerLost

if TYPE_CHECKING:
    from headway.agents.endpoint.endpoint_server import Endpoint  # the HTTP server takes a third of a second to import

AWAY_S, LOST_S = (0.5, 30.0), (0.05, 1.0)
"""Seconds before a program is run again, first and maximum: what it needs was away, or its worker was lost."""
_TOLD = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling settings that are passed to programs."""
MOST_LOSSES = 200
"""Maximum number of workers that an episode may lose because of other episodes."""


class Programs(Protocol):
    """Host of programs: `headway.agents.episodes.program_workers.ProgramWorkers`, or a simulation."""

    async def start(self) -> Any:
        """Start the processes of user code, if there are any. Raises as `Hosting.start` says."""

    async def run(self, job: EpisodeStart, on_ask: Ask, *, on_begin: Callable[[], object] | None = None) -> EpisodeEnd:
        """Run a program to its end, with turns from ``on_ask``. ``on_begin`` is called when it begins.

        Raises:
            RunnerLost: its process ended.
            ProgramAway: something that it needs is temporarily away.
            HeadwayError: it failed.
        """

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Hosting:
    """Settings with which an episode worker runs programs."""

    programs: Programs
    new_episode: Callable[..., EpisodeTokens]
    """Function that begins an episode. It gets the row's template variables, if any."""
    limits: EpisodeLimits
    seed: int = 0
    """Seed of the run."""
    stop_ids: tuple[int, ...] = ()
    """Further tokens that end a turn, beside those of the sampling."""
    gives_reward: bool = False
    """True if programs give the rewards, and no reward function gets an episode's last conversation."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables that the run gives to the chat template."""
    held_out_at_once: int | None = None
    """Maximum number of open held-out episodes of an episode worker; None for no limit."""
    endpoint: Endpoint | None = None
    """Endpoint at which agents ask for turns; None if programs only use their chat."""

    def sampling(self, asked: SamplingParams) -> SamplingParams:
        """Return the sampling of turns in an episode whose request has the sampling ``asked``."""
        return replace(asked, stop_token_ids=tuple(dict.fromkeys((*asked.stop_token_ids, *self.stop_ids))))

    async def start(self) -> None:
        """Start the programs' processes, and then the endpoint at which they ask.

        Raises:
            UserError: the user's code cannot be used, or the endpoint's port is in use.
            WorkerDied: a process ended while it loaded the code.
        """
        await self.programs.start()
        if self.endpoint is not None:
            try:
                await self.endpoint.start()
            except BaseException:
                await self.programs.close()
                raise

    async def close(self) -> None:
        """End all programs, and then the endpoint that they may be asking."""
        await self.programs.close()
        if self.endpoint is not None:
            await self.endpoint.close()


MadeEpisode = tuple[Trajectory, list[RowTokens]]
"""A finished episode: metadata with rows numbered from 0, and the rows' tokens, none if simulated."""


class ProgramEpisode:
    """An episode under way: `make` runs it, and `oldest_version` tells the oldest version of its tokens."""

    def __init__(self, request: Group, log: CallLog, hosting: Hosting, clock: EpisodeClock) -> None:
        """``log``: the log of the episode's calls, still empty."""
        self.id: TrajectoryId = log.id
        self._request, self._log, self._hosting, self._limits = request, log, hosting, hosting.limits
        self._losses = 0
        self._tries = 1
        self._again: str | None = None
        """Reason why the program was last run again; None before."""
        self._begun_anew = False
        """True if the episode was begun again with new answers, so that a tool is not called twice."""
        self._time = EpisodeTime(clock, self._limits)
        self._one = self._try()
        """The attempt under way, or the last one."""

    @property
    def oldest_version(self) -> int | None:
        """The oldest version in an answer of this attempt; None before the first token.

        Answers that only an earlier attempt asked for are not trained, so their versions do not count.
        """
        return min((version for call in self._one.calls for _, version in call.version_spans), default=None)

    async def make(self) -> MadeEpisode:
        """Run the program to its end. Raises nothing for a failure: it becomes the episode's."""
        end, failure = EpisodeEnd(), None
        try:
            while True:
                try:
                    ended = await self._run(self._one)
                except (RunnerLost, ProgramAway) as error:
                    await asyncio.sleep(self._wait_s(error))
                    self._tries += 1
                    self._log.run_again()
                else:
                    if ended is not None:
                        end = ended
                        break
                    self._again = f"{self._one.repeats} was called before, and must not be called again"
                    self._begun_anew = True
                    self._log.begin_anew()
                self._one = self._try()
        except HeadwayError as error:
            failure = str(error)
        finally:
            self._time.close()
            self._log.close()
        if failure is None and not self._begun_anew and (unused := self._log.calls.unused(self._log.group, self.id)):
            self._again = f"the program asks otherwise than before: {unused} finished answers are not used"
        return self._made(self._one, end, failure or self._failure_of(self._one, end))

    def _failure_of(self, one: EpisodeAttempt, end: EpisodeEnd) -> str | None:
        """Return why an episode failed although its program ended; None if it did not fail."""
        if one.limit is not None and (one.limit not in self._limits.train_on or not one.calls):
            before = "" if self._again is None else f"; before, its program was run again: {self._again}"
            return self._limits.text(one.limit) + before
        if not one.calls:
            who, todo = "program", "call chat.turn(messages) at least once"
            if self._hosting.endpoint is not None:
                who, todo = "agent", "give its client the base_url and the api_key of the episode"
            return (
                f"the {who} made no turn: it ended without an answer of the model, so there is nothing to train on; "
                f"{todo}"
            )
        if self._hosting.gives_reward and end.reward is None and not end.turn_rewards and one.limit is None:
            return (
                "the program gave no reward; return one from it (a command prints it as its last line), or name a "
                "reward.function that scores answers"
            )
        return None

    def aborted(self) -> MadeEpisode:
        """Return the episode of an aborted group as it is, without rows.

        Its tokens are the answers of this attempt, and those of calls that engines ended. Calls in flight are dropped
        and do not count: otherwise the group would keep its place until the last replica has reported.
        """
        cut = [call for call in self._log.cut if call.length]
        return self._trajectory([*self._one.calls, *cut], FinishReason.ABORTED), []

    # ------------------------------------------------------------------------------------- the program

    def _try(self) -> EpisodeAttempt:
        return EpisodeAttempt(
            self._hosting.new_episode(
                *([of_row] if (of_row := template_kwargs({}, self._request.prompt.extra)) else [])
            ),
            self._log,
            self._limits,
            self._time,
            trains=self._request.priority is Priority.TRAINING,
            keeps_conversation=not self._hosting.gives_reward or self._request.shown,
        )

    async def _run(self, one: EpisodeAttempt) -> EpisodeEnd | None:
        """Run the program once; None if it would have repeated a tool call that must not be repeated."""

        def begin() -> None:
            self._time.begin()
            one.begin_step()

        async def answer(request: TurnRequest) -> TurnAnswer:
            return (await one.turn(request)).answer

        prompt = self._request.prompt
        with nullcontext() if self._hosting.endpoint is None else self._hosting.endpoint.open(one) as access:
            start = EpisodeStart(
                one.name,
                [{"role": "user", "content": prompt.data_text}] if prompt.messages is None else prompt.messages,
                {**prompt.extra, "answer": prompt.answer, "source": prompt.source},
                _seed(self._hosting.seed, self.id),
                access,
                {name: getattr(self._log.sampling, name) for name in _TOLD},
                self._limits.max_length,
                template_kwargs(self._hosting.template_kwargs, prompt.extra),
                prompt.data_text,
            )
            # A separate task: a limit ends the program, but not the episode, which is this task.
            one.running = asyncio.get_running_loop().create_task(
                self._hosting.programs.run(start, answer, on_begin=begin)
            )
            try:
                end = await self._end_of(one, one.running)
            except HeadwayError:
                if one.repeats is None:
                    raise
            return end if one.repeats is None else None

    async def _end_of(self, one: EpisodeAttempt, running: asyncio.Task[EpisodeEnd]) -> EpisodeEnd:
        try:
            end = await running
        except asyncio.CancelledError:
            # This task itself is cancelled; else only the program was, by a limit.
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            if one.limit is None:
                raise ProgramFailed("the program ended with CancelledError, and nobody has cancelled it") from None
            return EpisodeEnd(turn_rewards=one.rewards)  # it was ended by a limit, not from outside
        except EpisodeOver:
            return EpisodeEnd(turn_rewards=one.rewards)
        except ProgramFailed:
            if one.limit is None or self._hosting.endpoint is None:
                raise
            return EpisodeEnd(turn_rewards=one.rewards)  # an agent raises its client's error for the refused request
        finally:
            # Before the cancellation: a turn that ends by it must begin no step.
            one.over = True
            running.cancel()
            self._time.end_step()
        if not isinstance(end, EpisodeEnd):
            raise RunError(f"a program ended with {end!r} in place of its end")
        return one.rewarded(end)

    def _wait_s(self, error: RunnerLost | ProgramAway) -> float:
        """Return the seconds before the program is run again. Raises ``error`` after too many failures.

        Up to `MOST_LOSSES` failures that other episodes caused do not count. A program that held its worker's event
        loop is not run again: it would do so again.
        """
        given_up = self._tries - self._losses > self._limits.retries
        if isinstance(error, RunnerLost) and error.culprit is False:
            self._losses += 1
            given_up = self._time.is_over or self._losses > MOST_LOSSES
        if given_up or (isinstance(error, RunnerLost) and error.culprit and error.timed_out):
            raise error
        self._again = str(error)
        first, most = LOST_S if isinstance(error, RunnerLost) else AWAY_S
        return float(min(most, first * 2 ** min(self._tries - 1, 16)))

    # ------------------------------------------------------------------------------------- the end

    def _made(self, one: EpisodeAttempt, end: EpisodeEnd, failure: str | None) -> MadeEpisode:
        rows = one.tokens.rows() if failure is None else []
        places = tuple(
            row if isinstance(row, RowAt) else RowAt(index, len(row.prompt_ids), len(row.ids))
            for index, row in enumerate(rows)
        )
        last = one.calls[-1] if one.calls else None
        episode = self._trajectory(one.calls, FinishReason.LENGTH if one.cut_off else FinishReason.STOP)
        trajectory = replace(
            episode,
            text=one.text,
            prompt_length=places[0].prompt_length if places else episode.prompt_length,
            finished=last.finished if last is not None else episode.finished,
            rows=places,
            conversation=one.conversation,
            reward=end.reward,
            turn_rewards=one.rewards_of_answers(end.turn_rewards),
            failure=failure,
            again=self._again,
            limit=one.limit,
            steps=tuple(self._time.steps),
            waits=tuple(self._time.waits),
            metrics={
                **end.metrics,
                "environment_s": self._time.environment_s,
                "step_tokens": max(0, sum(at.length for at in places) - episode.length),
                "tool_errors": end.tool_errors,
                "tries": self._tries,
                "cached_tokens": sum(call.cached for call in one.calls),
                **{str(note): count for note, count in one.noted.items()},
                **one.tokens.metrics,
            },
            notes={str(note): reason for note, reason in one.notes.items()},
        )
        return trajectory, [row for row in rows if isinstance(row, RowTokens)]

    def _trajectory(self, calls: Sequence[Completion], finish_reason: FinishReason) -> Trajectory:
        """Return the trajectory of ``calls`` so far, without rows."""
        now = asyncio.get_running_loop().time()
        return Trajectory(
            id=self.id,
            replica=self._log.replica,
            text="",
            prompt_length=len(self._request.prompt.token_ids),
            length=sum(call.length for call in calls),
            finish_reason=finish_reason,
            version_spans=spans_of(calls),
            started=calls[0].started if calls else self._time.started,
            finished=now,
            rows=(),
            turns=len(calls),
        )


def _seed(seed: int, id: TrajectoryId) -> int:
    """Return the seed of one episode, below 2^32."""
    parts = [part % 2**32 for part in id]  # held-out prompts may have a negative epoch, which numpy refuses
    return int(np.random.SeedSequence([seed, *parts]).generate_state(1)[0])
