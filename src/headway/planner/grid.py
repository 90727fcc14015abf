"""The settings that a plan compares: presets × splits of the devices × η × trigger.

    own    each preset at its own η and trigger, over the splits          around   η and trigger varied at one split
    full   the whole product

Everything follows from the presets' values. The work per version is the same for all settings: B comes from the
profile, so a setting's trigger determines ``require_batches = B / (mini-batch · trigger)``.

The devices of a mesh stay together, and so do those of a replica. The profile says which dimensions the mesh has.

    0 1 2 3 │ 4 5 6 7          machines of 4 devices; tp = 2, and 2 devices a replica
    └─┘ └─┘ │ └─┘ └─┘
    training    two replicas

Only whole meshes train. The remaining devices of each machine are filled with whole replicas.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from fractions import Fraction
from math import floor
from typing import Any, NamedTuple

from headway.config.presets import PRESETS, Values, preset
from headway.config.schema import Admission
from headway.config.sections.learning import ParallelConfig
from headway.config.sections.section import exact_fraction
from headway.errors import ConfigError
from headway.planner.profiles.job_profile import Profile

ETAS = (Fraction(1, 4), Fraction(1, 2), Fraction(1))
"""Values of η to try beside the preset's own, if that is above 0."""
TRAIN_SHARES = tuple(Fraction(*share) for share in ((1, 8), (1, 4), (3, 8), (1, 2), (5, 8), (3, 4), (7, 8)))
"""Shares of devices for training at which splits are tried, if there are many devices."""


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
        """The preset's values, with this setting's own η and trigger."""
        return preset(self.preset)

    @property
    def settings(self) -> dict[str, Any]:
        """The setting as configuration keys, without devices and meshes."""
        return {
            "mode": self.preset,
            "async_training.staleness_threshold": float(self.eta),
            "async_training.trigger_parameter_sync_step": self.trigger,
            "async_training.require_batches": self.require_batches,
        }

    @property
    def waves(self) -> bool:
        """True if groups are admitted a batch at a time."""
        return bool(self.values["async_training.admission"] == Admission.BATCH)

    @property
    def synchronous(self) -> bool:
        """True if each batch is generated and trained on before the next one is begun."""
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
    parallel = profile.train.parallel
    unit = parallel.least_ranks
    least = -(-profile.train.min_devices // unit) * unit  # rounded up to whole meshes
    if shared:
        training = devices - devices % unit
        found = {_replicas(profile, 0, training): training} if training >= least else {}
    else:
        # Of several numbers beside which as many replicas find place, the largest.
        found = {_replicas(profile, training, devices): training for training in range(least, devices, unit)}
    found.pop(0, None)
    if not found:
        why = "train.min_devices" + ("" if parallel.is_plain else f", in whole meshes of {in_words(parallel)}")
        enough = f"{_enough(profile, least, shared=shared)} or more{' to share' if shared else ''}"
        raise ConfigError(
            f"devices: got {devices}, but one rollout replica needs {per_replica} (rollout.devices) and training at "
            f"least {least} ({why}): expected {enough}; give more devices (--gpus), or a profile in which a replica or "
            "the trainer needs fewer"
        )
    chosen: Collection[int] = found
    if len(found) > len(TRAIN_SHARES):
        wanted = [round(devices * (1 - share) / per_replica) for share in TRAIN_SHARES]
        chosen = {min(found, key=lambda replicas: (abs(replicas - near), replicas)) for near in wanted}
    return [
        DeviceSplit(found[replicas], replicas * per_replica, replicas, shared=shared)
        for replicas in sorted(chosen, reverse=True)
    ]


def _replicas(profile: Profile, first: int, last: int) -> int:
    """Number of replicas on the devices ``first`` … ``last`` - 1, none of them on two machines."""
    size, machine = profile.rollout.devices, profile.devices_per_node or profile.devices
    if last - first < size:
        return 0
    begun = min(-first % machine, last - first)  # devices of the last training machine that are left
    machines, rest = divmod(last - first - begun, machine)
    # Rounded down on each machine: no replica is on two of them.
    return begun // size + machines * (machine // size) + rest // size


def _enough(profile: Profile, least: int, *, shared: bool) -> int:
    """Fewest devices on which ``least`` train beside one replica, or with one on the same devices."""
    size, unit = profile.rollout.devices, profile.train.parallel.least_ranks
    if shared:
        return max(least, -(-size // unit) * unit)
    left = size if profile.devices_per_node is None else -least % profile.devices_per_node
    return least + size + (left if left < size else 0)


def in_words(parallel: ParallelConfig) -> str:
    """The dimensions that are not 1, such as ``tp=2 ep=4``."""
    return " ".join(f"{name}={size}" for name, size in parallel if size > 1) or "replicate, tp, cp and ep of 1"


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
    """
    values = preset(mode)
    if trigger is None:
        trigger = max(t for t in triggers(profile) if t <= values["async_training.trigger_parameter_sync_step"])
    own_eta = values["async_training.staleness_threshold"]
    exact = exact_fraction(own_eta if eta is None else eta)
    return PlanSetting(mode, split, exact, trigger, profile.batch.mini_batches // trigger)


def triggers(profile: Profile) -> list[int]:
    """Numbers of batches per version that leave whole mini-batches in each batch."""
    mini_batches = profile.batch.mini_batches
    return [trigger for trigger in range(1, mini_batches + 1) if mini_batches % trigger == 0]


def own(profile: Profile) -> list[PlanSetting]:
    """Settings of each preset at its own η and trigger, on every split. Raises `ConfigError` when no split fits.

    If a replica has several devices, presets with shared devices are left out, since a run refuses them.
    """
    shared = {mode: values["cluster.placement"] == "shared" for mode, values in PRESETS.items()}
    return [
        setting_of(profile, mode, split)
        for mode in PRESETS
        if not shared[mode] or profile.rollout.devices == 1
        for split in splits(profile, shared=shared[mode])
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
    return [
        setting_of(profile, own_one.preset, own_one.split, eta=eta, trigger=trigger)
        for own_one in own(profile)
        for eta in ([own_one.eta] if own_one.waves else _etas(profile, own_one))
        for trigger in ([own_one.trigger] if own_one.waves else triggers(profile))
    ]


def _etas(profile: Profile, setting: PlanSetting) -> list[Fraction]:
    """The setting's η and, unless it is 0, others that let at least one group run ahead."""
    others = [eta for eta in ETAS if floor(eta * profile.batch.groups_per_version) > 0] if setting.eta > 0 else []
    return sorted({setting.eta, *others})
