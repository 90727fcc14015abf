"""PromptLoader: admits as many prompts into the pipeline as staleness allows.

consumes        the prompt source
waits for       room under the inequality (and, in batch admission, for the last wave to be rewarded)
is unblocked by a new version served, a discarded group, a rewarded group, a finished validation
produces        waves, in shares: lists of requests that an episode worker makes together
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace

from headway.config.schema import Config
from headway.config.sizing.placement import needs_greedy_baseline
from headway.data.interfaces.episode_groups import Group, PromptSource
from headway.data.interfaces.rollout import SamplingParams
from headway.data.types import Prompt
from headway.pipeline.admission.pipeline_state import RunState
from headway.pipeline.admission.staleness import wave_size
from headway.pipeline.episode_workers import EpisodeWorkers, Share
from headway.pipeline.stage import Stage


@dataclass(eq=False)
class PromptLoader(Stage[list[Prompt], Share]):
    waits_for_input = "room under the staleness limit"
    waits_for_output = None

    config: Config
    run_state: RunState
    source: PromptSource
    episode_workers: EpisodeWorkers
    stop_token_ids: tuple[int, ...]
    _ended: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._sampling = training_sampling(self.config, self.stop_token_ids)
        greedy = replace(self._sampling, temperature=0.0, top_p=1.0, top_k=0)
        self._baseline = greedy if needs_greedy_baseline(self.config) else None

    @property
    def waiting_for(self) -> str | None:
        waiting = super().waiting_for
        return "the end of the run, with all groups admitted" if waiting and self.run_state.all_admitted else waiting

    async def get_input_data(self) -> list[Prompt] | None:
        # Reopened groups come first: they keep their numbers and places in the order of consumption.
        if self.run_state.reopened:
            await self.run_state.changed.until(lambda: self._ended or self.run_state.staleness.serves)
            return [prompt for _, prompt in self.run_state.reopened.values()]  # `admit` removes each from it
        while not self._ended:
            await self.run_state.changed.until(lambda: self._ended or self._room() > 0)
            if not self._ended and (prompts := self._next(self._room())):
                return prompts
            # The data has ended. Prompts of groups under way may still come back, if the groups are lost.
            await self.run_state.changed.until(
                lambda: self._ended or bool(self.run_state.waiting_again) or self.run_state.unrewarded == 0
            )
            if not self.run_state.waiting_again:
                return None
        return None

    async def process_data(self, prompts: list[Prompt]) -> AsyncGenerator[Share, None]:
        wave = [group for prompt in prompts if (group := self._admit(prompt)) is not None]
        for share in self.episode_workers.assign(wave):
            yield share

    def _admit(self, prompt: Prompt) -> Group | None:
        """Admit a group for ``prompt``. Returns None if the group ended before the run was resumed."""
        if (number := self.run_state.admit(prompt)) is None:
            return None
        shown = self.run_state.ledger.open[number].drawn is not None
        n = self.config.rollout.n
        return Group(number, prompt, n, self._sampling, baseline_sampling=self._baseline, shown=shown)

    def end(self) -> None:
        """Admit no further groups."""
        self._ended = True
        self.run_state.changed.changed()

    def _next(self, count: int) -> list[Prompt]:
        """Return at most ``count`` next prompts, none at the end of the data. Prompts of lost groups come first."""
        prompts: list[Prompt] = []
        while len(prompts) < count:
            if self.run_state.waiting_again:
                prompts.append(self.source.again(self.run_state.waiting_again.popleft()))
            elif (prompt := self.source.next()) is not None:
                prompts.append(prompt)
            else:
                break
        return prompts

    def _room(self) -> int:
        state = self.run_state
        if not state.admits:
            return 0
        return wave_size(
            self.config.async_training.admission,
            room=state.staleness.room,
            unrewarded=state.unrewarded,
            # With η = 0 a wave also waits for its version's validation, so that an engine's batches are the same in
            # every run. With η > 0 generation goes on beside validation. Without a replica an interrupted validation
            # has yet to begin again: otherwise the wave reached new replicas together with its problems.
            validation_runs=state.staleness.eta == 0 and bool(state.validating or not state.staleness.loaded),
            groups_per_version=state.staleness.groups_per_version,
        )


def sampling(config: Config, stop_token_ids: tuple[int, ...], temperature: float) -> SamplingParams:
    """Return the sampling parameters common to training and validation. Answers end with one of ``stop_token_ids``."""
    return SamplingParams(
        max_tokens=config.data.max_response_length,
        temperature=temperature,
        stop_token_ids=stop_token_ids,
        stop=config.rollout.stop,
    )


def training_sampling(config: Config, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """Return the sampling parameters of training episodes. Answers end with one of ``stop_token_ids``."""
    rollout = config.rollout
    return replace(
        sampling(config, stop_token_ids, rollout.temperature),
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty,
        logit_bias=tuple(rollout.logit_bias.items()),
        min_tokens=rollout.min_tokens,
    )
