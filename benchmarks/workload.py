"""One workload's costs from a few assumptions: what `benchmarks.calibrate` fits, and what it cannot.

decode step of a replica of t devices, with a active sequences and c tokens in its cache
    = overhead + (weight bytes + c · cache bytes) / (t · bandwidth) + a · token compute / t
token compute of an engine = a share of the device-seconds that the published forward pass takes per token
training on a published number of devices = the published seconds over the workload's tokens
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headway.planner.grid import mean_length
from headway.planner.profiles.job_profile import (
    BatchProfile,
    ConstantLengths,
    LognormalLengths,
    PhaseProfile,
    Profile,
    RolloutProfile,
    SharedProfile,
    TrainPoint,
    TrainProfile,
    UpdateProfile,
)


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of a colocated synchronous step."""

    total: float
    generation: float
    old_log_prob: float
    update: float

    @property
    def rest(self) -> float:
        """What the three parts do not add up to."""
        return self.total - self.generation - self.old_log_prob - self.update


PUBLISHED: Mapping[int, Parts] = {
    32: Parts(790.10, 357.41, 107.71, 313.81),
    64: Parts(365.28, 150.72, 70.26, 133.41),
    128: Parts(356.30, 177.85, 53.92, 113.81),
}
"""By number of GPUs: Qwen2.5-Math-7B, DAPO, 512 prompts × 16 answers a step, mini-batches of 32 prompts."""
BATCH = BatchProfile(groups_per_version=512, ppo_mini_batch_size=32, n=16)
LONGEST = 28_672
WEIGHT_BYTES = 15_200_000_000
"""7.6 billion parameters in bf16."""
CACHE_BYTES = 28 * 2 * 4 * 128 * 2
"""Of one token: layers × (key and value) × key-value heads × their size × bytes of bf16."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of answers: what is fitted."""

    mean: float
    """Before the cut, in tokens."""
    sigma: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What the record does not say."""

    prompt_tokens: int = 150
    within_group: float = 0.5
    tensor_parallel: int = 4
    slots: int = 256
    bandwidth: float = 2.0e12
    """Bytes that a device reads from its memory per second while it decodes."""
    overhead_s: float = 2e-3
    """Of a decode step, whatever its size."""
    compute_share: float = 0.5
    """An engine's compute per token, decoded or prefilled, over that of the trainer's forward pass."""
    update_s: float = 5.5
    """To bring new weights to replicas on devices of their own."""
    longer: Mapping[int, float] = field(default_factory=dict)
    """How much longer the answers of the run on so many devices were than the workload's; default: 1."""
    train: Mapping[int, Parts] = field(default_factory=lambda: PUBLISHED)
    """What old log-probs and updates take, by number of devices."""
    recompute_old_log_probs: str = "shared"

    def lengths_on(self, devices: int, lengths: Lengths) -> LognormalLengths:
        """Those of the published run on so many devices."""
        return LognormalLengths(
            kind="lognormal",
            mean=lengths.mean * self.longer.get(devices, 1.0),
            sigma=lengths.sigma,
            max=LONGEST,
            within_group=self.within_group,
        )


def profile_of(assumptions: Assumptions, lengths: Lengths, response: LognormalLengths | None = None) -> Profile:
    """The workload's profile; ``response`` are other answers than its own, at the same costs."""
    points = [_train_point(assumptions, lengths, devices) for devices in sorted(assumptions.train)]
    tensor_parallel, slots = assumptions.tensor_parallel, assumptions.slots
    # Few devices forward most efficiently: with more, what does not scale counts.
    compute_s = assumptions.compute_share * points[0].forward_token_s * points[0].devices / tensor_parallel
    bytes_per_s = tensor_parallel * assumptions.bandwidth
    fixed_s = assumptions.overhead_s + WEIGHT_BYTES / bytes_per_s
    return Profile(
        name="Qwen2.5-Math-7B, DAPO",
        devices=max(PUBLISHED),
        batch=BATCH,
        prompt=ConstantLengths(kind="constant", tokens=assumptions.prompt_tokens),
        response=response or assumptions.lengths_on(0, lengths),
        rollout=RolloutProfile(
            devices=tensor_parallel,
            slots=slots,
            decode=[(1, _rounded(fixed_s + compute_s)), (slots, _rounded(fixed_s + slots * compute_s))],
            kv_token_s=_rounded(CACHE_BYTES / bytes_per_s),
            prefill_token_s=_rounded(compute_s),
        ),
        train=TrainProfile.model_validate(
            {"points": points, "min_devices": 8, "recompute_old_log_probs": assumptions.recompute_old_log_probs}
        ),
        **_handing_over(assumptions),
    )


def _train_point(assumptions: Assumptions, lengths: Lengths, devices: int) -> TrainPoint:
    """The published seconds over the tokens that took them; what an optimizer step costs by itself is not known."""
    response = assumptions.lengths_on(devices, lengths)
    tokens = BATCH.groups_per_version * BATCH.n * (assumptions.prompt_tokens + mean_length(response))
    parts = assumptions.train[devices]
    return TrainPoint(
        devices=devices, token_s=_rounded(parts.update / tokens), forward_token_s=_rounded(parts.old_log_prob / tokens)
    )


def _handing_over(assumptions: Assumptions) -> dict[str, UpdateProfile | SharedProfile]:
    """Shared devices: all that the published parts leave out. Devices of their own: a guess, half of it sending."""
    rest = sum(parts.rest for parts in PUBLISHED.values()) / len(PUBLISHED)
    local = assumptions.update_s / 2
    return {
        "update": UpdateProfile(
            nbytes=WEIGHT_BYTES,
            gather=PhaseProfile(latency_s=_rounded(local / 2)),
            send=PhaseProfile(latency_s=_rounded(assumptions.update_s - local)),
            load=PhaseProfile(latency_s=_rounded(local / 2)),
        ),
        "shared": SharedProfile(to_train_s=_rounded((rest - local) / 2), to_generate_s=_rounded((rest - local) / 2)),
    }


def _rounded(value: float) -> float:
    """To four significant digits."""
    return float(f"{value:.4g}")
