"""A rough guess of each setting's step time, in closed form. It decides what is simulated first, and nothing else.

Training is exact for mean lengths, where loads are even. Generation takes at least

    its work      all tokens, with as many slots full as groups may exist
    a latency     until the longest answer of a group is done, over the versions' worth of groups that may exist at once
    the tail      until the longest answer of all is done, where nothing may be in flight at an update
    steps         those of an episode, in its latency or its tail, and all of them where environments are few
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist, fmean

from headway.planner.grid import PlanSetting
from headway.planner.profiles.costs import decode_cost, train_cost
from headway.planner.profiles.distributions import mean_of, mean_of_cut_lognormal
from headway.planner.profiles.job_profile import ConstantLengths, EmpiricalLengths, LengthsProfile, Profile
from headway.planner.profiles.program_profile import ProgramProfile


@dataclass(frozen=True, slots=True)
class Shares:
    """Seconds per version that each side computes."""

    training: float
    generation: float

    def step_s(self, setting: PlanSetting) -> float:
        """Combine both sides into a step time: the slower one's if they work side by side, the sum on shared devices or
        in turns. With η = 0 the last fetch of a version is trained on while nothing is generated."""
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
