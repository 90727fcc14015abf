"""Memory table of ``headway doctor``: each kind of process, and what does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.config.schema import Config
    from headway.config.sizing.model_shape import ModelShape
    from headway.config.sizing.run_memory import RunProcess

WIDTH, COLUMN = 80, 12


def memory_lines(config: Config) -> Iterator[str]:
    """Yield the lines of the table, of 80 columns at most; none where the model's sizes are not known."""
    found = _processes(config)
    if found is None:
        return
    shape, processes, on_cpu = found
    yield _row(f"memory, {_billions(shape)} parameters", "device", "host")
    for process in processes:
        yield _row(f"{process.name} × {process.count}")
        memory, moment = process.memory, process.memory.busiest
        for line in memory.lines:
            when = " *" if line not in memory.held else ""
            sizes = ("", size(line.nbytes)) if line.on_host else (size(line.nbytes), "")
            yield _row(f"  {line.name}{when}", *sizes)
        yield _row("  at most", size(memory.device), size(memory.host))
        if moment is not None:
            yield f"  * {moment}: the moment that takes most"
    device = sum(process.count * process.memory.device for process in processes)
    host = sum(process.count * process.memory.host for process in processes)
    yield _row("all processes", size(device), size(host))
    yield from _too_large(config, processes, on_cpu=on_cpu)


def memory_in_short(config: Config) -> str | None:
    """Return the table in one line; None where the model's sizes are not known."""
    found = _processes(config)
    if found is None:
        return None
    shape, processes, _ = found
    parts = [f"{process.name} {size(process.memory.device)}" for process in processes]
    return f"{_billions(shape)} parameters, at most {', '.join(parts)} (headway doctor has the table)"


def _processes(config: Config) -> tuple[ModelShape, list[RunProcess], bool] | None:
    from headway.config.sizing.run_memory import processes
    from headway.devices import listed_here

    shape = _shape(config)
    if shape is None:
        return None
    asked = config.cluster.device
    on_cpu = asked == "cpu" or (asked == "auto" and config.cluster.address is None and listed_here() == 0)
    return shape, processes(config, shape, on_cpu=on_cpu, device_bytes=_device_bytes(config, on_cpu=on_cpu)), on_cpu


def _shape(config: Config) -> ModelShape | None:
    from headway.config.sizing.model_shape import ModelShape
    from headway.config.sizing.run_memory import made
    from headway.errors import ModelError
    from headway.models.model_folder import find_folder, read_object

    model = config.model
    if model.path is None:
        return None if model.make is None else ModelShape.of(made(model.make))
    try:
        folder = find_folder(model.path)
        return None if folder is None else ModelShape.of(read_object(folder / "config.json"))
    except ModelError:  # the checks of a run's inputs say what is wrong
        return None


def _device_bytes(config: Config, *, on_cpu: bool) -> int | None:
    """Bytes of a device of the run; None where they are not known."""
    from headway.devices import memory_listed_here

    return None if config.cluster.address is not None else memory_listed_here(on_cpu=on_cpu)


def _too_large(config: Config, processes: list[RunProcess], *, on_cpu: bool) -> Iterator[str]:
    there = _device_bytes(config, on_cpu=on_cpu)
    if there is None:
        return
    if on_cpu:
        needed = sum(process.count * process.memory.device for process in processes)
        if needed > there:
            yield f"note: all processes together take up to {size(needed)}, and this machine has {size(there)}"
        return
    for process in processes:
        if process.memory.device > there:
            yield (
                f"note: a {process.name} takes up to {size(process.memory.device)}, and a device here has "
                f"{size(there)}; docs/training.md says what to lower"
            )


def _row(name: str, device: str = "", host: str = "") -> str:
    return f"{name:<{WIDTH - 2 * COLUMN}}{device:>{COLUMN}}{host:>{COLUMN}}".rstrip()


def _billions(shape: ModelShape) -> str:
    number = shape.parameters
    return f"{number / 1e9:.3g} B" if number >= 1e9 else f"{number / 1e6:.3g} M"


def size(nbytes: int) -> str:
    if not nbytes:
        return "0"
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.1f} MB"
