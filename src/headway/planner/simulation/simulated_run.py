"""One simulated run: the real pipeline, with machinery that only takes time behind every protocol.

profile ─▶ config_for ─▶ Config ─┐
   └─▶ costs, lengths ───────────┴─▶ Simulation ─▶ Pipeline on the virtual clock ─▶ events
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from headway.agents.episodes.episode_worker import EpisodeWorker
from headway.agents.episodes.program_episode import Hosting
from headway.agents.episodes.program_workers import limits_of
from headway.config.layers import nest
from headway.config.presets import preset
from headway.config.schema import Config
from headway.config.sizing.placement import concurrent, needs_logp, needs_reference
from headway.config.transport_facts import TRANSPORTS
from headway.errors import ConfigError
from headway.events import Observer
from headway.pipeline.run import Pipeline, Status
from headway.pipeline.wiring import Machinery, Parts
from headway.planner.profiles.costs import Contention, phase_seconds, train_cost
from headway.planner.profiles.job_profile import (
    ContentionProfile,
    EmpiricalLengths,
    PhaseProfile,
    Profile,
    SharedProfile,
    UpdateProfile,
)
from headway.planner.profiles.lengths import filtered_of, lengths_of
from headway.planner.simulation.simulated_prompts import (
    SimulatedEpisodeTokens,
    SimulatedPrograms,
    SimulatedReward,
    SimulatedSource,
    held_out_prompts,
    zero_advantages,
)
from headway.planner.simulation.simulated_rollout import SimulatedRollout
from headway.planner.simulation.simulated_trainer import SimulatedTrainer, SimulatedTransport
from headway.planner.simulation.virtual_clock import run_virtual

FOREVER_S = 1e7
"""Timeout in seconds that no simulated job reaches. A stuck run still ends there, and says who waits for whom."""
ACTIVITY_INTERVAL_S = 600.0
"""Seconds between reports of a replica's activity: seldom, as hundreds report; busy spans are exact all the same."""
PROGRAM = "simulated.py:program"
"""Name of the program in configurations. Nothing loads it."""
NOWHERE = Path("checkpoints")
"""The folder in which a simulated trainer would save; it writes nothing."""


class Simulation:
    """One simulated run of the real pipeline, to be run once. Events go to ``observers``, in virtual seconds from 0."""

    def __init__(
        self, profile: Profile, config: Config, *, seed: int | None = None, observers: Sequence[Observer] = ()
    ) -> None:
        """Build the run of ``config``, which is resolved: counts of devices, no shares. ``seed`` replaces its own."""
        if seed is not None:
            config = config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})
        self.seconds = 0.0
        """Virtual seconds that the run took; 0 until it has ended."""
        costs = _update_costs(profile, config)
        self.transport = SimulatedTransport(costs)
        # On shared devices only one side computes at a time.
        contends = config.cluster.placement != "shared" and profile.contention != ContentionProfile()
        contention = Contention(profile.contention) if contends else None
        devices = config.trainer.nnodes * config.trainer.n_gpus_per_node
        self.trainer = SimulatedTrainer(
            train_cost(profile.train, devices),
            costs,
            self.transport,
            ranks=profile.train.divided_over(devices),
            fetch_s=profile.latency.fetch_s,
            contention=contention,
        )
        self.replicas = _replicas(profile, config, self.transport, contention)
        parts = _parts(profile, config, self.trainer, self.replicas)
        self.pipeline = Pipeline(config, parts, observers, NOWHERE)

    def run(self) -> Status:
        """Simulate the run. Raises what the pipeline raises."""
        with _collecting_garbage_seldom():
            return run_virtual(self._run())

    async def _run(self) -> Status:
        try:
            return await self.pipeline.run()
        finally:
            self.seconds = asyncio.get_running_loop().time()


@contextmanager
def _collecting_garbage_seldom() -> Iterator[None]:
    """Collect garbage seldom: Python would otherwise scan thousands of live trajectories again and again."""
    usual = gc.get_threshold()
    gc.set_threshold(200_000, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def _parts(profile: Profile, config: Config, trainer: SimulatedTrainer, replicas: Sequence[SimulatedRollout]) -> Parts:
    # Recorded prompts go with the recorded answers to them; draws from distributions are independent.
    seed = config.run.seed
    prompts = lengths_of(profile.prompt, seed if isinstance(profile.prompt, EmpiricalLengths) else ~seed)
    return Parts(
        source=SimulatedSource(prompts, filtered=filtered_of(profile.response, seed)),
        validation=held_out_prompts(profile.validation.problems if profile.validation else 0, prompts),
        machinery=Machinery(
            rollouts=replicas,
            episode_workers=[EpisodeWorker("episode-worker", hosting=_hosting(profile, config, replicas))],
            trainer=trainer,
            reference=trainer if needs_reference(config) else None,
            proximal=trainer if needs_logp(config) else None,
        ),
        reward=SimulatedReward(profile.reward, seed),
        advantages=zero_advantages,
        workers=lambda: [trainer],
    )


def _hosting(profile: Profile, config: Config, replicas: Sequence[SimulatedRollout]) -> Hosting | None:
    if profile.program is None:
        return None
    programs = SimulatedPrograms(profile.program)
    at_once = sum(2 * replica.slots for replica in replicas)
    return Hosting(programs, SimulatedEpisodeTokens, limits_of(config), seed=config.run.seed, held_out_at_once=at_once)


def _update_costs(profile: Profile, config: Config) -> UpdateProfile:
    """The costs of an update; inside one process nothing is sent, received or registered."""
    facts = TRANSPORTS.get(config.param_update.transport)  # None for ``auto``: between processes
    if facts is None or not facts.within_process:
        return profile.update
    free = PhaseProfile()
    return profile.update.model_copy(update={"send": free, "recv": free, "register_": free})


def _replicas(
    profile: Profile, config: Config, transport: SimulatedTransport, contention: Contention | None
) -> list[SimulatedRollout]:
    shared = profile.shared if config.cluster.placement == "shared" else SharedProfile()
    engine = partial(
        SimulatedRollout,
        profile=profile.rollout.model_copy(update={"slots": concurrent(config)}),
        lengths=lengths_of(profile.response, config.run.seed),
        receive=transport.receive,
        load_s=phase_seconds(profile.update.load, profile.update.nbytes),
        sleep_s=shared.to_train_s,
        wake_s=shared.to_generate_s,
        delivery_s=profile.latency.group_s,
        resume_s=profile.latency.update_s,
        contention=contention,
    )
    return [engine(f"rollout-{index}") for index in range(config.rollout.replicas)]


def config_for(
    profile: Profile,
    mode: str,
    *,
    train_devices: int,
    replicas: int,
    versions: int,
    eta: Fraction | float | None = None,
    trigger: int | None = None,
    activity_interval_s: float = ACTIVITY_INTERVAL_S,
) -> Config:
    """The configuration of ``mode`` for the profile's job, so many ``versions`` long; B is the profile's.

    The trigger divides the mini-batches of a version. Raises `ConfigError` where no group would have variance.
    """
    values: dict[str, Any] = {"mode": mode, **preset(mode)}
    if eta is not None:
        values["async_training.staleness_threshold"] = eta
    if trigger is not None:
        values["async_training.trigger_parameter_sync_step"] = trigger
    shared = values["cluster.placement"] == "shared"
    batches = values["async_training.trigger_parameter_sync_step"]
    values["async_training.require_batches"] = profile.batch.mini_batches // batches
    values |= {
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": train_devices,
        "rollout.nnodes": 1,
        "rollout.n_gpus_per_node": replicas * profile.rollout.devices,
        "rollout.tensor_model_parallel_size": profile.rollout.devices,
        **_job(profile, versions),
        "async_training.use_rollout_log_probs": not profile.train.recomputes_old_log_probs(shared=shared),
        "cluster.stall_timeout_s": FOREVER_S,
        "param_update.timeout_s": FOREVER_S,
        "reports.activity_interval_s": activity_interval_s,
        "reports.live": "off",
        "reports.trackers": [],
    }
    return Config.model_validate(nest(values))


def _job(profile: Profile, versions: int) -> dict[str, Any]:
    """Values of the configuration that are the same in every mode."""
    batch, validation, answer = profile.batch, profile.validation, profile.response.longest
    if batch.n == 1 and profile.reward.filtered > 0:
        raise ConfigError(
            f"reward.filtered: got {profile.reward.filtered:g} with batch.n=1, expected 0: a single answer has no "
            "variance, so every group would be filtered"
        )
    values = {
        "actor.ppo_mini_batch_size": batch.ppo_mini_batch_size,
        "actor.ppo_epochs": batch.ppo_epochs,
        "actor.parallel": profile.train.parallel.model_dump(),
        "actor.use_kl_loss": profile.train.reference,
        "algorithm.filter_groups.enable": profile.reward.filtered > 0 or filtered_of(profile.response, 0) is not None,
        "data.max_prompt_length": profile.prompt.longest,
        "data.max_response_length": answer,
        "rollout.n": batch.n,
        "rollout.max_concurrent": profile.rollout.slots,
        "rollout.total_rollout_steps": versions * batch.groups_per_version,
        "rollout.val_n": validation.n if validation else 1,
        "rollout.test_freq": validation.test_freq if validation else -1,
    }
    if (program := profile.program) is not None:
        turns = max(1, round(program.turns.largest))
        values |= {
            "data.max_response_length": turns * (answer + round(program.step_tokens.largest)),
            "agent.program": PROGRAM,
            "agent.max_turns": turns,
            "agent.max_turn_tokens": answer,
            "agent.step_timeout_s": FOREVER_S,
            "agent.episode_timeout_s": FOREVER_S,
        }
    return values
