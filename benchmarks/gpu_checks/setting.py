"""What a check is given, and how it answers."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.devices import DeviceKind


@dataclass(frozen=True, slots=True)
class Setting:
    """A check's device, size and folder."""

    device: str
    """``cuda`` or ``cpu``."""
    scratch: Path
    """A folder for models and files that checks of one run share; what is in it may be reused."""
    small: bool = False
    """Sizes for the CPU form: seconds on two cores, and figures that say nothing about speed."""
    ranks: int | None = None
    """Processes of the checks that span several; default: a GPU each, or what the check takes on a CPU."""

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def patience(self) -> float:
        """Factor of all limits: a CPU may be slow, and others may use it."""
        return 1.0 if self.on_gpu else 8.0

    @property
    def kind(self) -> DeviceKind:
        from headway.devices import kind_of  # what can be run is known before Headway has to be there

        return kind_of(self.device)

    def give_back(self) -> None:
        """Give memory that nothing holds any more back to the device."""
        if self.on_gpu:  # to look through all that lives takes a second
            gc.collect()
        self.kind.release_cached()

    def wait(self) -> None:
        """Return when the device has computed everything that it was given."""
        self.kind.synchronize(self.device)


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding of a check, a row of the table. A check yields each as soon as it knows it."""

    name: str
    """Name of the row, one of the check's `Check.findings`. Texts of one name are put together."""
    text: str
    lines: Sequence[str] = ()
    """What is told below the table."""


Findings = Iterator[Finding]


class CheckFailed(Exception):
    """Something is not as it has to be: what, by how much, and what was expected."""


class Skipped(Exception):
    """The check cannot be made here, and why."""


def require(right: bool, message: str) -> None:
    """Raise `CheckFailed` with ``message`` unless it is ``right``."""
    if not right:
        raise CheckFailed(message)


@contextmanager
def one_rank_group(setting: Setting) -> Iterator[None]:
    """torch.distributed's default group of this process alone, as ``cluster.backend=inline`` makes it."""
    import torch.distributed as dist

    dist.init_process_group(setting.kind.process_groups, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
