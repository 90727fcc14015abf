"""Devices that go together: those of a mesh, by the dimensions that a profile was measured with, and of a replica.

    0 1 2 3 │ 4 5 6 7          machines of 4 devices; tp = 2, and 2 devices a replica
    └─┘ └─┘ │ └─┘ └─┘
    training    two replicas

Whole meshes train, whole replicas find place on what is left of each machine.
"""

from __future__ import annotations

from headway.config.schema import Config
from headway.config.sections.learning import ParallelConfig
from headway.errors import ConfigError
from headway.planner.profiles.job_profile import Profile


def most_replicas(profile: Profile, *, beside: int = 0) -> int:
    """Most replicas that the profile's devices hold, each on one machine, ``beside`` so many that train."""
    return _whole(profile, beside, profile.devices)


def replicas_within(profile: Profile, devices: int) -> int:
    """Most replicas that share the first ``devices`` of the profile's, each on one machine."""
    return _whole(profile, 0, devices)


def least_training(profile: Profile) -> int:
    """Fewest devices that hold the model, in whole meshes."""
    unit = profile.train.parallel.least_ranks
    return -(-profile.train.min_devices // unit) * unit


def least_devices(profile: Profile, *, shared: bool) -> int:
    """Fewest devices on which the model trains beside one replica, or with one on the same devices."""
    least, size, unit = least_training(profile), profile.rollout.devices, profile.train.parallel.least_ranks
    if shared:
        return max(least, -(-size // unit) * unit)
    left = size if profile.devices_per_node is None else -least % profile.devices_per_node
    return least + size + (left if left < size else 0)


def training_problem(profile: Profile, devices: int) -> str | None:
    """Problem with ``devices`` for training, or None."""
    train = profile.train
    if devices < train.min_devices:
        return f"{devices} for training, expected at least {train.min_devices} (train.min_devices)"
    if devices % train.parallel.least_ranks:
        return (
            f"{devices} for training, expected a multiple of {train.parallel.least_ranks}: training was measured with "
            f"{in_words(train.parallel)} (train.parallel)"
        )
    return None


def replicas_problem(profile: Profile, train_devices: int, replicas: int, *, shared: bool) -> str | None:
    """Problem with placing so many replicas on the machines beside training, or None."""
    room = most_replicas(profile, beside=0 if shared else train_devices)
    if replicas <= room:
        return None
    return (
        f"{replicas} × {profile.rollout.devices} for generation, expected at most {room} replicas: each has its "
        f"devices on one machine of {profile.devices_per_node} (devices_per_node)"
    )


def check_mesh(profile: Profile, config: Config) -> None:
    """Raise `ConfigError` unless ``config`` trains on the mesh that the profile was measured with, in whole ones."""
    given, measured = config.actor.parallel, profile.train.parallel
    if given != measured:
        expected = " ".join(settings_of(measured, given))
        raise ConfigError(
            f"actor.parallel: got {in_words(given)}, but the profile's training was measured with "
            f"{in_words(measured)}, and says nothing of other meshes; give {expected}, or a profile of a run with "
            f"{in_words(given)} (headway profile RUN)"
        )
    trainer = config.trainer
    whose = "trainer.nnodes × n_gpus_per_node"
    if problem := next(given.problems(trainer.nnodes, trainer.n_gpus_per_node, whose), None):
        raise ConfigError(problem)


def in_words(parallel: ParallelConfig) -> str:
    """The dimensions that are not 1, such as ``tp=2 ep=4``."""
    return " ".join(f"{name}={size}" for name, size in parallel if size > 1) or "replicate, tp, cp and ep of 1"


def settings_of(parallel: ParallelConfig, instead_of: ParallelConfig) -> list[str]:
    """The settings by which a configuration with the mesh ``instead_of`` gets this one."""
    had = dict(instead_of)
    return [f"actor.parallel.{name}={size}" for name, size in parallel if size != had[name]]


def _whole(profile: Profile, first: int, last: int) -> int:
    """Number of replicas on the devices ``first`` … ``last`` - 1, none of them on two machines."""
    size, machine = profile.rollout.devices, profile.devices_per_node or profile.devices
    if last - first < size:
        return 0
    begun = min(-first % machine, last - first)  # what training leaves of its last machine
    machines, rest = divmod(last - first - begun, machine)
    return begun // size + machines * (machine // size) + rest // size
