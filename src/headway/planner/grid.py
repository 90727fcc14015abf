"""The settings that a plan compares: presets × splits of the devices × η × trigger; and a forecast of each.

    own    each preset at its own η and trigger, over the splits          around   η and trigger varied at one split
    full   the whole product

Everything is read off the presets' values. The work per version is the same everywhere: B is the profile's, so a
setting's trigger decides ``require_batches = B / (mini-batch · trigger)``.

The forecast of a setting's step time, in closed form, decides what is simulated first, and nothing else.

Training is exact for mean lengths, where loads are even. Generation takes at least

    its work      all tokens, with as many slots full as groups may exist
    a latency     until the longest answer of a group is done, over the versions' worth of groups that may exist at once
    the tail      until the longest answer of all is done, where nothing may be in flight at an update
    steps         those of an episode, in its latency or its tail, and all of them where environments are few
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import floor
from statistics import NormalDist, fmean
from typing import NamedTuple

from headway.config.presets import PRESETS, Values, preset
from headway.config.schema import Admission
from headway.config.sections.section import exact_fraction
from headway.errors import ConfigError
from headway.planner.profiles.costs import decode_cost, train_cost
from headway.planner.profiles.job_profile import (
    ConstantLengths,
    EmpiricalLengths,
    LengthsProfile,
    Profile,
    ProgramProfile,
    mean_of,
    mean_of_cut_lognormal,
)
from headway.planner.profiles.profile_mesh import (
    in_words,
    least_devices,
    least_training,
    most_replicas,
    replicas_problem,
    replicas_within,
    training_problem,
)

ETAS = (Fraction(1, 4), Fraction(1, 2), Fraction(1))
"""Values of η that are tried beside a preset's own where that is above 0."""
TRAIN_SHARES = tuple(Fraction(*share) for share in ((1, 8), (1, 4), (3, 8), (1, 2), (5, 8), (3, 4), (7, 8)))
"""Shares of the devices at which splits are looked for when there are more than a handful."""


class DeviceSplit(NamedTuple):
    """A division of the devices between training and generation; both have the same ones when ``shared``."""

    train_devices: int
    rollout_devices: int
    replicas: int
    shared: bool

    def __str__(self) -> str:
        return f"{self.train_devices} shared" if self.shared else f"{self.train_devices}:{self.rollout_devices}"


@dataclass(frozen=True, slots=True)
class PlanSetting:
    """A setting to simulate: preset, split, η and trigger. It becomes one row of a plan."""

    preset: str
    split: DeviceSplit
    eta: Fraction
    trigger: int
    """Number of batches per version."""
    require_batches: int
    """Number of mini-batches per batch."""

    @property
    def values(self) -> Values:
        """The preset's values, over which this setting's own η and trigger take precedence."""
        return preset(self.preset)

    @property
    def waves(self) -> bool:
        """Tell whether groups are admitted a batch at a time."""
        return bool(self.values["async_training.admission"] == Admission.BATCH)

    @property
    def synchronous(self) -> bool:
        """Tell whether each batch is generated and trained on before the next one is begun."""
        return self.eta == 0 and self.waves

    def __str__(self) -> str:
        return f"{self.preset} {self.split} η={float(self.eta):g} trigger={self.trigger}"


def splits(profile: Profile, *, shared: bool = False) -> list[DeviceSplit]:
    """Ways to divide the profile's devices, most training devices last. Shared devices are divided in one way.

    Whole meshes train, and whole replicas generate; devices that make neither are left over.

    Raises:
        ConfigError: none fits.
    """
    devices, per_replica = profile.devices, profile.rollout.devices
    if shared:
        training = devices - devices % profile.train.parallel.least_ranks
        replicas = replicas_within(profile, training)
        found = {replicas: training} if replicas and training >= least_training(profile) else {}
    else:
        found = _training_beside(profile)
    if not found:
        raise ConfigError(_too_few(profile, shared=shared))
    chosen = found if len(found) <= len(TRAIN_SHARES) else _handful(profile, found)
    return [
        DeviceSplit(found[replicas], replicas * per_replica, replicas, shared=shared)
        for replicas in sorted(chosen, reverse=True)
    ]


def _training_beside(profile: Profile) -> dict[int, int]:
    """Number of replicas → the most devices, in whole meshes, that can train beside so many."""
    unit = profile.train.parallel.least_ranks
    beside = range(least_training(profile), profile.devices, unit)
    found = {most_replicas(profile, beside=training): training for training in beside}
    found.pop(0, None)
    return found


def _handful(profile: Profile, possible: Collection[int]) -> set[int]:
    """The ``possible`` replica counts nearest to a few shares of the devices."""
    wanted = (round(profile.devices * (1 - share) / profile.rollout.devices) for share in TRAIN_SHARES)
    return {min(possible, key=lambda replicas: (abs(replicas - near), replicas)) for near in wanted}


def _too_few(profile: Profile, *, shared: bool) -> str:
    parallel = profile.train.parallel
    why = "train.min_devices" if parallel.is_plain else f"train.min_devices, in whole meshes of {in_words(parallel)}"
    needed = f"{least_devices(profile, shared=shared)} or more{' to share' if shared else ''}"
    return (
        f"devices: got {profile.devices}, but one rollout replica needs {profile.rollout.devices} (rollout.devices) "
        f"and training at least {least_training(profile)} ({why}): expected {needed}; give more devices (--gpus), or a "
        "profile in which a replica or the trainer needs fewer"
    )


def setting_of(
    profile: Profile,
    mode: str,
    split: DeviceSplit,
    *,
    eta: Fraction | float | str | None = None,
    trigger: int | None = None,
) -> PlanSetting:
    """Make the setting of ``mode`` on ``split``; η and trigger are the preset's own unless they are given.

    The preset's own trigger becomes the largest that divides the mini-batches of a version.

    Raises:
        ConfigError: there is no such mode, its placement is not the split's, or the trigger does not divide.
    """
    values = preset(mode)
    if split.shared is not _is_shared(values):
        raise ConfigError(
            f"{mode}: got the split {split}, but its cluster.placement is {values['cluster.placement']}: expected "
            f"{'all devices for both' if _is_shared(values) else 'devices of their own for training and generation'}"
        )
    mini_batches = profile.batch.groups_per_version // profile.batch.ppo_mini_batch_size
    if trigger is None:
        trigger = max(t for t in triggers(profile) if t <= values["async_training.trigger_parameter_sync_step"])
    if trigger not in triggers(profile):
        raise ConfigError(
            f"{mode}: got trigger {trigger}, but a version is {mini_batches} mini-batches: expected one of "
            f"{', '.join(map(str, triggers(profile)))}, so that each batch has whole ones"
        )
    own_eta = values["async_training.staleness_threshold"]
    return PlanSetting(mode, split, exact_fraction(own_eta if eta is None else eta), trigger, mini_batches // trigger)


def split_of(profile: Profile, mode: str, train_devices: int, rollout_devices: int) -> DeviceSplit:
    """An explicit split for ``mode``. Raises `ConfigError` when it is not made of whole replicas or does not fit."""
    shared, per_replica = _is_shared(preset(mode)), profile.rollout.devices
    used = max(train_devices, rollout_devices) if shared else train_devices + rollout_devices
    problems = []
    if used > profile.devices:
        problems.append(f"together {used} of {profile.devices} devices")
    if (problem := training_problem(profile, train_devices)) is not None:
        problems.append(problem)
    replicas, rest = divmod(rollout_devices, per_replica)
    if not replicas or rest:
        problems.append(f"{rollout_devices} for generation, expected a multiple of {per_replica} (rollout.devices)")
    elif used <= profile.devices and (problem := replicas_problem(profile, train_devices, replicas, shared=shared)):
        problems.append(problem)
    if problems:
        raise ConfigError(f"{mode} on {train_devices}:{rollout_devices}: {'; '.join(problems)}")
    return DeviceSplit(train_devices, rollout_devices, replicas, shared)


def triggers(profile: Profile) -> list[int]:
    """Numbers of batches per version that leave whole mini-batches in each batch."""
    mini_batches = profile.batch.groups_per_version // profile.batch.ppo_mini_batch_size
    return [trigger for trigger in range(1, mini_batches + 1) if mini_batches % trigger == 0]


def own(profile: Profile) -> list[PlanSetting]:
    """Settings of each preset at its own η and trigger, on every split. Raises `ConfigError` when no split fits.

    Without presets of shared devices where a replica has several: a run refuses these.
    """
    several = profile.rollout.devices > 1
    return [
        setting_of(profile, mode, split)
        for mode in PRESETS
        if not (several and _is_shared(PRESETS[mode]))
        for split in splits(profile, shared=_is_shared(PRESETS[mode]))
    ]


def around(profile: Profile, setting: PlanSetting) -> list[PlanSetting]:
    """Vary ``setting``: another η, or the next smaller or larger trigger.

    Neither is varied for a preset that admits groups a batch at a time: they define such a preset.
    """
    if setting.waves:
        return []
    possible = triggers(profile)
    at = possible.index(setting.trigger)
    neighbours = [t for t in possible[max(at - 1, 0) : at + 2] if t != setting.trigger]
    other_etas = [replace(setting, eta=eta) for eta in _etas(profile, setting) if eta != setting.eta]
    return other_etas + [
        setting_of(profile, setting.preset, setting.split, eta=setting.eta, trigger=t) for t in neighbours
    ]


def full(profile: Profile) -> list[PlanSetting]:
    """All combinations of preset, split, η and trigger. Raises `ConfigError` when no split fits."""
    return list(_product(profile))


def _product(profile: Profile) -> Iterator[PlanSetting]:
    for setting in own(profile):
        if setting.waves:
            yield setting
            continue
        for eta in _etas(profile, setting):
            for trigger in triggers(profile):
                yield setting_of(profile, setting.preset, setting.split, eta=eta, trigger=trigger)


def _etas(profile: Profile, setting: PlanSetting) -> list[Fraction]:
    """The setting's η and, unless it is 0, others that let at least one group run ahead."""
    others = [eta for eta in ETAS if floor(eta * profile.batch.groups_per_version) > 0] if setting.eta > 0 else []
    return sorted({setting.eta, *others})


def _is_shared(values: Values) -> bool:
    return bool(values["cluster.placement"] == "shared")


@dataclass(frozen=True, slots=True)
class Shares:
    """Seconds per version that each side computes."""

    training: float
    generation: float

    def step_s(self, setting: PlanSetting) -> float:
        """Combine both sides into a step time: the slower one's if they work side by side, the sum on shared devices or
        in turns. With η = 0 the last batch of a version is trained on while nothing is generated."""
        if setting.synchronous or setting.split.shared:
            return self.training + self.generation
        if setting.eta == 0:
            return max(self.training, self.generation + self.training / setting.trigger)
        return max(self.training, self.generation)


def forecast(profile: Profile, setting: PlanSetting) -> Shares:
    return Shares(_training(profile, setting), _generation(profile, setting))


def _training(profile: Profile, setting: PlanSetting) -> float:
    batch, train = profile.batch, profile.train
    cost = train_cost(train, setting.split.train_devices)
    read = mean_of(profile.program.turns) * mean_of(profile.program.step_tokens) if profile.program else 0.0
    tokens = batch.groups_per_version * batch.n * (mean_length(profile.prompt) + mean_episode(profile) + read)
    steps = batch.ppo_epochs * batch.groups_per_version // batch.ppo_mini_batch_size
    ranks, of_step = train.divided_over(setting.split.train_devices), batch.ppo_mini_batch_size * batch.n
    uneven = ranks * math.ceil(of_step / ranks) / of_step
    forwards = train.recomputes_old_log_probs(shared=setting.split.shared) + train.reference
    return steps * cost.step_s + (batch.ppo_epochs * cost.token_s * uneven + forwards * cost.forward_token_s) * tokens


def _generation(profile: Profile, setting: PlanSetting) -> float:
    batch, rollout, cost = profile.batch, profile.rollout, decode_cost(profile.rollout)
    prompt, answer = mean_length(profile.prompt), mean_episode(profile)
    groups = batch.groups_per_version / (1 - profile.reward.filtered)
    of_one = groups * batch.n / setting.split.replicas
    active = max(1, round(min(rollout.slots, of_one * float(1 + setting.eta))))
    step_s = cost.step_s(active, kv=active * (prompt + answer / 2))
    work = of_one * (answer / active * step_s + (prompt * rollout.prefill_token_s + rollout.prefill_s) / batch.n)
    if profile.program is not None:
        return _with_steps(profile.program, setting, work, groups * batch.n, decoding_s=answer * step_s)
    if setting.eta == 0 or setting.values["async_training.on_update"] == "drain":
        longest = longest_length(profile.response, draws=math.ceil(groups * batch.n))
        return work + (longest - answer) * cost.step_s(1)
    latency = longest_length(profile.response, draws=batch.n) * step_s
    return max(work, latency / float(1 + setting.eta))


def _with_steps(
    program: ProgramProfile, setting: PlanSetting, work: float, episodes: float, *, decoding_s: float
) -> float:
    """Combine the decoding of ``episodes`` with their steps, which take no slots, but perhaps environments."""
    steps_s = mean_of(program.turns) * mean_of(program.step_s)
    if program.environments is not None:
        work = max(work, episodes * (steps_s + decoding_s) / program.environments)
    if setting.eta == 0 or setting.values["async_training.on_update"] == "drain":
        return work + steps_s
    return max(work, (steps_s + decoding_s) / float(1 + setting.eta))


def mean_episode(profile: Profile) -> float:
    """Mean number of sampled tokens of an episode."""
    answer = mean_length(profile.response, answers=profile.batch.n)
    return answer if profile.program is None else answer * mean_of(profile.program.turns)


def mean_length(lengths: LengthsProfile, *, answers: int = 1) -> float:
    """Mean number of tokens of the first ``answers`` answers of a group."""
    match lengths:
        case ConstantLengths():
            return lengths.tokens
        case EmpiricalLengths():
            return fmean(group[k % len(group)] for group in lengths.groups for k in range(answers))
    return mean_of_cut_lognormal(lengths.mean, lengths.sigma, lengths.max)


def longest_length(lengths: LengthsProfile, draws: int) -> float:
    """Tokens of the longest of ``draws`` independent answers, roughly."""
    match lengths:
        case ConstantLengths():
            return lengths.tokens
        case EmpiricalLengths():
            ordered = sorted(length for group in lengths.groups for length in group)
            return ordered[math.ceil(len(ordered) * draws / (draws + 1)) - 1]
    mu = math.log(lengths.mean) - lengths.sigma**2 / 2
    return min(math.exp(mu + lengths.sigma * NormalDist().inv_cdf(draws / (draws + 1))), lengths.max)
