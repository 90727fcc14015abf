"""A profile: what a job costs, in numbers that a simulation can use. One YAML file, written by hand or by a real run.

    lengths ─▶ how many tokens each answer has          train  ─▶ what an optimizer step costs, by number of ranks
    rollout ─▶ what decoding and prefilling cost        update ─▶ what bringing new weights to a replica costs

Devices are GPUs, or processes on a CPU. All times are seconds, all sizes tokens or bytes.

Numbers of a program (turns, seconds of a step, tokens that it adds) come from one of three distributions:

kind        keys                  a draw
constant    value                 is the value
lognormal   mean, sigma, max      is exp(normal), cut at ``max``: heavy-tailed
recorded    values                is that of one recorded episode, and the same one wherever the episode asks

"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from statistics import NormalDist
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator

from headway.config.sections.learning import ParallelConfig
from headway.config.sections.section import NonNegative, Positive, Section

_normal = NormalDist()


class ConstantNumber(Section):
    kind: Literal["constant"]
    value: float = Field(ge=0)

    def draw(self, *, episode: float, own: float) -> float:
        """Return the number that two uniform numbers in (0, 1) decide: the episode's, and that of this very draw."""
        return self.value

    @property
    def largest(self) -> float:
        """Upper bound of the draws."""
        return self.value


class LognormalNumber(Section):
    """Log-normal numbers, cut at ``max``. Each draw is independent of all others."""

    kind: Literal["lognormal"]
    mean: float = Field(gt=0)
    """Mean of the distribution before the cut."""
    sigma: float = Field(ge=0, le=4)
    """Standard deviation of the logarithm."""
    max: float = Field(gt=0)

    def draw(self, *, episode: float, own: float) -> float:
        """See `ConstantNumber.draw`; the episode has no part in it."""
        mu = math.log(self.mean) - self.sigma**2 / 2
        return min(math.exp(mu + self.sigma * _normal.inv_cdf(own)), self.max)

    @property
    def largest(self) -> float:
        """Upper bound of the draws."""
        return self.max


class RecordedNumber(Section):
    """Measured numbers, one for each recorded episode, as means over its turns where it had several.

    A simulated episode takes all of its recorded numbers from the same recorded episode.
    """

    kind: Literal["recorded"]
    values: list[Annotated[float, Field(ge=0)]] = Field(min_length=1)

    def draw(self, *, episode: float, own: float) -> float:
        """See `ConstantNumber.draw`; all draws of an episode are of the same recorded one."""
        return self.values[int(episode * len(self.values))]

    @property
    def largest(self) -> float:
        """Upper bound of the draws."""
        return max(self.values)


# Not `discriminator="kind"`: pydantic refuses a field for that where the model has a validator before all fields.
def _kind_of(value: Any) -> Any:
    return value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)


NumberProfile = Annotated[
    Annotated[ConstantNumber, Tag("constant")]
    | Annotated[LognormalNumber, Tag("lognormal")]
    | Annotated[RecordedNumber, Tag("recorded")],
    Discriminator(_kind_of),
]


class ProgramProfile(Section):
    """Episodes of several turns, each followed by a step of the environment.

    The profile's ``response`` has the tokens of one turn.
    """

    turns: NumberProfile
    """Number of turns of an episode, rounded, at least 1."""
    step_s: NumberProfile = ConstantNumber(kind="constant", value=0.0)
    """Seconds of the step after a turn, in which the episode holds no slot of a replica."""
    step_tokens: NumberProfile = ConstantNumber(kind="constant", value=0.0)
    """Number of tokens that a step adds to the context, rounded."""
    forks: float = Field(0.0, ge=0, le=1)
    """Share of further turns whose context begins again at the prompt, and so makes a row of its own."""
    environments: Positive | None = None
    """Most episodes that are open at once, on all machines together: ``agent.environment_processes``. Further ones
    wait before their first turn. Default: no limit, as for asynchronous programs."""


Seconds = Annotated[float, Field(ge=0)]
PositiveSeconds = Annotated[float, Field(gt=0)]


class BatchProfile(Section):
    """Sizes of batches. B is fixed here, so that every row of a plan does the same work per version."""

    groups_per_version: Positive
    """Number of groups (prompts) that one version trains on: B."""
    ppo_mini_batch_size: Positive
    """Number of groups per optimizer step."""
    n: Positive = 8
    """Number of trajectories per group."""
    ppo_epochs: Positive = 1

    @property
    def mini_batches(self) -> int:
        """Number of mini-batches of a version."""
        return self.groups_per_version // self.ppo_mini_batch_size

    @model_validator(mode="after")
    def _whole_mini_batches(self) -> BatchProfile:
        if self.groups_per_version % self.ppo_mini_batch_size:
            raise ValueError(
                f"expected groups_per_version ({self.groups_per_version}) to be a multiple of ppo_mini_batch_size "
                f"({self.ppo_mini_batch_size})"
            )
        return self


class ConstantLengths(Section):
    kind: Literal["constant"]
    tokens: Positive

    @property
    def longest(self) -> int:
        """Upper bound of the lengths."""
        return self.tokens


class LognormalLengths(Section):
    """Log-normal lengths, cut at ``max``: the usual shape of reasoning answers, most short and a few very long."""

    kind: Literal["lognormal"]
    mean: float = Field(gt=0)
    """Mean of the distribution before the cut, in tokens."""
    sigma: float = Field(ge=0, le=4)
    """Standard deviation of the logarithm."""
    max: Positive
    """Largest length in tokens, where sampling stops (``data.max_response_length``)."""
    within_group: float = Field(0.0, ge=0, le=1)
    """Share of the logarithm's variance that the answers of one group have in common: hard prompts are long for all."""

    @property
    def longest(self) -> int:
        """Upper bound of the lengths."""
        return self.max


class EmpiricalLengths(Section):
    """Measured lengths, group by group. A group is drawn whole, so that what its answers have in common stays."""

    kind: Literal["empirical"]
    groups: list[Annotated[list[Positive], Field(min_length=1)]] = Field(min_length=1)
    replay: bool = False
    """Row i takes ``groups[i mod len(groups)]``, as recorded, instead of a drawn one; rows are admitted in order."""
    filtered: list[NonNegative] | None = None
    """Indices of those ``groups`` of answers that were filtered. A simulated group that takes the lengths of one is
    filtered, too: easy and hard prompts have answers of other lengths. Default: unknown."""

    @field_validator("filtered")
    @classmethod
    def _of_these_groups(cls, filtered: list[int] | None, info: ValidationInfo) -> list[int] | None:
        groups = info.data.get("groups")
        if filtered is None or groups is None:
            return filtered
        if sorted(set(filtered)) != filtered or (filtered and filtered[-1] >= len(groups)):
            raise ValueError(f"expected indices of the {len(groups)} groups, each once, in order")
        return filtered

    @property
    def longest(self) -> int:
        """Upper bound of the lengths."""
        return max(map(max, self.groups))


LengthsProfile = Annotated[
    Annotated[ConstantLengths, Tag("constant")]
    | Annotated[LognormalLengths, Tag("lognormal")]
    | Annotated[EmpiricalLengths, Tag("empirical")],
    Discriminator(_kind_of),
]


class RolloutProfile(Section):
    """Sizes and costs of one rollout replica."""

    devices: Positive = 1
    """Devices that one replica occupies (its tensor-parallel degree)."""
    slots: Positive = 64
    """Number of trajectories that decode at once: ``rollout.max_concurrent``."""
    kv_tokens: Positive | None = None
    """Number of tokens that the KV cache holds, prompts included; beyond that the youngest sequence is preempted and
    prefilled again later. Default: no limit."""
    decode: list[tuple[Positive, PositiveSeconds]] = Field(min_length=1)
    """Points (active sequences, seconds of one decode step), linear in between, the last slope beyond the end."""
    kv_token_s: Seconds = 0.0
    """Further seconds of one decode step per token in the KV cache: what attention over long contexts costs."""
    prefill_token_s: Seconds = 0.0
    """Seconds per prefilled token. Decoding waits while the replica prefills."""
    prefill_s: Seconds = 0.0
    """Seconds of each prefill, whatever its length, besides those per token."""
    threads: NonNegative = 0
    """Number of torch threads with which the costs were measured; 0 if unknown."""

    @field_validator("decode")
    @classmethod
    def _a_curve(cls, curve: list[tuple[int, float]]) -> list[tuple[int, float]]:
        counts = [active for active, _ in curve]
        if counts != sorted(set(counts)):
            raise ValueError(f"expected numbers of active sequences that grow, but got {counts}")
        for (fewer, quicker), (more, slower) in pairwise(curve):
            if slower < quicker:
                raise ValueError(
                    f"a step with {more} active sequences ({slower:g} s) is faster than with {fewer} ({quicker:g} s); "
                    "expected times that do not fall"
                )
        return curve


class TrainPoint(Section):
    """Costs of training on ``devices`` devices. All seconds are wall time of the whole trainer."""

    devices: Positive
    step_s: Seconds = 0.0
    """Seconds per optimizer step, whatever its size."""
    token_s: Seconds
    """Seconds per token of an optimizer step (prompt and answer)."""
    forward_token_s: Seconds = 0.0
    """Seconds per token of a forward pass for log-probs."""


class TrainProfile(Section):
    parallel: ParallelConfig = ParallelConfig()
    """The mesh with which all points were measured, as ``actor.parallel``. Default: every rank has rows of its own."""
    even: bool = False
    """True if seconds per token are those of work that is divided evenly over the data ranks, devices / (cp · tp): a
    simulated step then takes as long as the rank that has most of it, by the division that a real trainer makes.
    Default: what uneven loads cost is in the figures, at any number of devices."""
    points: list[TrainPoint] = Field(min_length=1)
    """Costs at the measured numbers of devices. Between two, seconds are interpolated (log–log); outside, seconds per
    token scale inversely with devices."""
    min_devices: Positive = 1
    """Fewest devices that hold the model, its gradients and optimizer."""
    recompute_old_log_probs: Literal["never", "shared", "always"] = "never"
    """The modes in which one forward pass over each batch precedes its first step (``use_rollout_log_probs: false``),
    instead of taking the engine's own log-probs. ``shared``: only where training and generation share devices, as
    colocated synchronous systems usually do."""
    reference: bool = False
    """True if each batch takes one more forward pass, for the reference policy."""
    threads: NonNegative = 0

    def divided_over(self, devices: int) -> int:
        """Number of data ranks over which a simulation divides work on ``devices``; 1 where the figures contain it."""
        return devices // self.parallel.inner if self.even else 1

    def recomputes_old_log_probs(self, *, shared: bool) -> bool:
        """Tell whether a row recomputes old log-probs, by whether its devices are ``shared``."""
        return self.recompute_old_log_probs == "always" or (shared and self.recompute_old_log_probs == "shared")

    @field_validator("parallel")
    @classmethod
    def _a_mesh(cls, parallel: ParallelConfig) -> ParallelConfig:
        if parallel.ep > 1 and parallel.ep % parallel.tp:
            raise ValueError(f"expected ep ({parallel.ep}) to be a multiple of tp ({parallel.tp}), or 1")
        return parallel

    @field_validator("points")
    @classmethod
    def _growing_meshes(cls, points: list[TrainPoint], info: ValidationInfo) -> list[TrainPoint]:
        counts = [point.devices for point in points]
        if counts != sorted(set(counts)):
            raise ValueError(f"expected numbers of devices that grow, but got {counts}")
        parallel: ParallelConfig = info.data.get("parallel", ParallelConfig())
        if any(count % parallel.least_ranks for count in counts):
            raise ValueError(
                f"expected multiples of {parallel.least_ranks} devices, which the mesh train.parallel takes, but got "
                f"{counts}"
            )
        return points


class PhaseProfile(Section):
    """Cost of one phase of an update: ``latency_s + nbytes / bytes_per_s`` seconds."""

    latency_s: Seconds = 0.0
    bytes_per_s: float | None = Field(None, gt=0)
    """Throughput in bytes per second. Default: bytes cost nothing."""


class UpdateProfile(Section):
    nbytes: NonNegative = 0
    """Size in bytes of one complete set of weights in the served dtype."""
    gather: PhaseProfile = PhaseProfile()
    send: PhaseProfile = PhaseProfile()
    recv: PhaseProfile = PhaseProfile()
    register_: PhaseProfile = Field(PhaseProfile(), alias="register")
    load: PhaseProfile = PhaseProfile()


class SharedProfile(Section):
    """Costs of handing over devices that training and generation share."""

    to_train_s: Seconds = 0.0
    """Seconds of a handover to training: the engine sleeps, the trainer's state comes back to the device."""
    to_generate_s: Seconds = 0.0
    """Seconds of a handover to generation: the trainer's state leaves the device, the engine wakes."""


class RewardProfile(Section):
    seconds: Seconds = 0.0
    """Seconds to score one group."""
    workers: Positive = 1
    """Number of groups that are scored at once."""
    filtered: float = Field(0.0, ge=0, lt=1)
    """Share of groups that are filtered, and refilled, because their rewards have no variance. Which ones is drawn,
    unless ``response.filtered`` says it."""


class ValidationProfile(Section):
    problems: Positive
    n: Positive = 1
    test_freq: Positive = 1
    """Number of versions between two validations."""


class ContentionProfile(Section):
    """Factors by which a side's work takes longer while the other one computes: where training and generation have
    devices of their own, but cores or memory in common. All costs are those of a side that computes alone."""

    train: float = Field(1.0, ge=1)
    """Factor by which training takes longer while any replica computes."""
    rollout: float = Field(1.0, ge=1)
    """Factor by which generation takes longer while the trainer computes."""


class LatencyProfile(Section):
    """Seconds that pass while nothing is computed: messages under way, and the driver's own work between two parts."""

    group_s: Seconds = 0.0
    """Seconds of a group's way to its replica and back, from admission to its first step and from its last token to the
    reward. It holds no slot."""
    fetch_s: Seconds = 0.0
    """Seconds of each batch: advantages, the driver's work before, between and after its optimizer steps. A simulation
    counts it as part of the batch's first step."""
    update_s: Seconds = 0.0
    """Seconds of each parameter update beside its phases: the trainer is held for so much longer, decoding is not."""


class Profile(Section):
    """Everything that a plan needs to know about a job."""

    name: str
    devices: Positive
    """Number of devices altogether (``--gpus`` overrides it)."""
    batch: BatchProfile
    prompt: LengthsProfile
    response: LengthsProfile
    program: ProgramProfile | None = None
    """Turns and steps of episodes, where a program makes them; ``response`` then has the tokens of one turn. Default:
    single answers."""
    rollout: RolloutProfile
    train: TrainProfile
    update: UpdateProfile = UpdateProfile()
    shared: SharedProfile = SharedProfile()
    reward: RewardProfile = RewardProfile()
    validation: ValidationProfile | None = None
    latency: LatencyProfile = LatencyProfile()
    contention: ContentionProfile = ContentionProfile()
    devices_per_node: Positive | None = Field(None, validate_default=True)
    """Number of devices of one machine. Inner meshes (cp · tp ranks) and replicas have theirs on one. Default: all are
    on one."""
    assumptions: list[str] = Field(default_factory=list)
    """Sentences on what was not measured, and how uncertain it is; shown beside the plan."""
    measured_on: str | None = None
    """The machine on which the profile was measured, in words."""

    @field_validator("devices_per_node")
    @classmethod
    def _holds_groups(cls, per_node: int | None, info: ValidationInfo) -> int | None:
        # A section that is wrong itself is not among the data.
        train, rollout = info.data.get("train"), info.data.get("rollout")
        if per_node is None:
            return None
        if isinstance(train, TrainProfile) and per_node % train.parallel.inner:
            raise ValueError(
                f"expected a multiple of {train.parallel.inner}, as the cp · tp ranks of an inner mesh "
                f"(train.parallel) are on one machine, but got {per_node}"
            )
        if isinstance(rollout, RolloutProfile) and per_node < rollout.devices:
            raise ValueError(
                f"expected at least {rollout.devices}, as a replica (rollout.devices) is on one machine, but got "
                f"{per_node}"
            )
        return per_node
