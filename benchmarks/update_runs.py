"""What ``make bench-update`` runs: models of three sizes, every permitted update, and one run of training for each.

SIZES × kinds() ─▶ settings over benchmarks/update.yaml ─▶ headway train, a process ─▶ run directory
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path

from safetensors import safe_open

from benchmarks.runner import train
from headway.config.doctor import diagnose
from headway.config.loading import load
from headway.config.sections.model_section import MakeModelConfig
from headway.config.transport_facts import TRANSPORTS
from headway.errors import ConfigError
from headway.models.made_model import make_model

WORKLOAD = Path("benchmarks/update.yaml")
VOCABULARY = "0123456789abcdefghijklmnopqrstuvwxyz=?"
WARM_UP = 2
"""Versions at the beginning that are not measured: memory is touched for the first time, connections are new."""
AT_THE_END = 2
"""Versions that are not measured either: nothing more is admitted."""


@dataclass(frozen=True, slots=True)
class Size:
    """A model, and the workload that goes with it."""

    name: str
    hidden: int
    heads: int
    layers: int
    groups: int
    """Per version."""
    long_groups: int
    """Per version, where versions are long enough for an update to be a small part of them."""


SIZES = {
    size.name: size
    for size in (
        Size("1m", hidden=128, heads=4, layers=5, groups=16, long_groups=128),
        Size("25m", hidden=512, heads=8, layers=7, groups=4, long_groups=48),
        Size("100m", hidden=1024, heads=16, layers=7, groups=4, long_groups=32),
    )
}


@dataclass(frozen=True, slots=True)
class Model:
    folder: Path
    parameters: int
    """Tied ones once."""

    @property
    def nbytes(self) -> int:
        """Of all weights, as they are served: in bfloat16."""
        return 2 * self.parameters


def make(size: Size, folder: Path) -> Model:
    config = MakeModelConfig(
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        head_dim=size.hidden // size.heads,
        intermediate_size=13 * size.hidden // 4,
        max_position_embeddings=128,
        vocabulary=VOCABULARY,
    )
    make_model(config, 0, folder)
    parameters = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            parameters += sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return Model(folder, parameters)


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to update."""

    transport: str
    schedule: str = "synchronous"
    encoding: str = "full"
    place: str = "processes"
    """``processes`` (one trains, one generates), ``inline`` (one process, a thread each), ``shared`` (taking turns)."""
    on_update: str = "keep"
    dual_buffer: bool = True
    verify: bool = True

    @property
    def name(self) -> str:
        return " ".join((self.transport, self.schedule, self.encoding, *self.variant))

    @property
    def variant(self) -> tuple[str, ...]:
        """In which it differs from the rows that compare transports."""
        return (
            *([self.place] if self.place != "processes" else ()),
            *([self.on_update] if self.on_update != "keep" else ()),
            *(["no second buffer"] if not self.dual_buffer and self.place != "shared" else ()),
            *(["no probe"] if not self.verify else ()),
        )

    def settings(self) -> tuple[str, ...]:
        shared = ("cluster.placement=shared",) if self.place == "shared" else ()
        buffer = () if self.place == "shared" else (f"rollout.enable_dual_buffer={str(self.dual_buffer).lower()}",)
        return (
            f"param_update.transport={self.transport}",
            f"param_update.schedule={self.schedule}",
            f"param_update.encoding={self.encoding}",
            f"param_update.verify={str(self.verify).lower()}",
            f"async_training.on_update={self.on_update}",
            f"cluster.backend={'inline' if self.place == 'inline' else 'ray'}",
            *buffer,
            *shared,
        )

    def is_asked_for(self, only: Sequence[str]) -> bool:
        """``only``: ``transport[:schedule[:encoding]]`` each; none asks for everything."""
        mine = (self.transport, self.schedule, self.encoding)
        asked = (tuple(one.split(":")) for one in only)
        return not only or any(mine[: len(parts)] == parts for parts in asked)


LONG = Kind("broadcast", "overlapped")
"""What the aims for stalls are about."""


def kinds() -> list[Kind]:
    """Every transport × schedule × encoding that the doctor permits, then what else may differ about one of them."""
    schedules, encodings = ("synchronous", "overlapped"), ("full", "delta")
    every = [Kind(*parts) for parts in product(TRANSPORTS, schedules, encodings)]
    every += [Kind("local", schedule, place="inline") for schedule in schedules]
    every += [Kind("local", place="shared", on_update="interrupt", dual_buffer=False)]
    every += [Kind("broadcast", schedule, on_update="interrupt") for schedule in schedules]
    every += [Kind("broadcast", "overlapped", verify=False), Kind("broadcast", dual_buffer=False)]
    return [kind for kind in every if _is_permitted(kind)]


def _is_permitted(kind: Kind) -> bool:
    settings = ("model.path=anywhere", "rollout.total_rollout_steps=64", "actor.ppo_mini_batch_size=4")
    try:
        diagnose(load(WORKLOAD, [*kind.settings(), *settings]))
    except ConfigError:
        return False
    return True


def update_run(
    directory: Path, model: Model, kind: Kind, *, groups: int, versions: int, extra: Sequence[str] = ()
) -> Path:
    """Train ``versions`` of ``groups`` with ``kind``; returns the run's directory."""
    return train(
        directory,
        f"model.path={model.folder}",
        f"actor.ppo_mini_batch_size={groups}",
        f"rollout.total_rollout_steps={groups * versions}",
        *kind.settings(),
        *extra,
        recipe=WORKLOAD,
    )
