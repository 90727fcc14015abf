"""Summary of settings: derived numbers, the devices of each role, and memory by process.

The doctor shows the memory of each kind of process; it and ``--dry-run`` show which ranks are on one machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

import typer

from headway.config.sections.learning import ParallelConfig
from headway.config.sizing.placement import ACTOR, CRITIC, LOGP, REF, ROLLOUT, NodeShare, Placement
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.config.loading import LoadedConfig
    from headway.config.schema import Config
    from headway.config.sizing.model_shape import ModelShape
    from headway.config.sizing.run_memory import RunProcess

WIDTH, COLUMN = 80, 12
PROBLEM = "problem: "
"""Beginning of a line about a problem."""


class _Memory(NamedTuple):
    """Facts about a run's memory that are known before it starts."""

    shape: ModelShape
    processes: list[RunProcess]
    on_cpu: bool
    device_bytes: int | None
    """Bytes of memory of a device of the run; None if unknown."""


def memory_lines(config: Config) -> Iterator[str]:
    """Yield the lines of the memory table, at most 80 columns wide; none if the model's sizes are unknown."""
    if (found := _memory(config)) is None:
        return
    yield _row(f"memory, {_billions(found.shape)} parameters", "device", "host")
    for process in found.processes:
        yield _row(f"{process.name} × {process.count}")
        memory, moment = process.memory, process.memory.busiest
        for line in memory.lines:
            when = " *" if line not in memory.held else ""
            sizes = ("", size(line.nbytes)) if line.on_host else (size(line.nbytes), "")
            yield _row(f"  {line.name}{when}", *sizes)
        yield _row("  at most", size(memory.device), size(memory.host))
        if moment is not None:
            yield f"  * {moment}: the moment that takes most"
    device = sum(process.count * process.memory.device for process in found.processes)
    host = sum(process.count * process.memory.host for process in found.processes)
    yield _row("all processes", size(device), size(host))
    there = found.device_bytes
    if there is None:
        return
    if not found.on_cpu:
        yield from _notes_on_devices(config, found, there)
    elif device > there:
        yield f"note: all processes together take up to {size(device)}, and this machine has {size(there)}"


def memory_in_short(config: Config) -> str | None:
    """Return the memory table in one line; None if the model's sizes are unknown."""
    if (found := _memory(config)) is None:
        return None
    parts = [f"{process.name} {size(process.memory.device)}" for process in found.processes]
    return f"{_billions(found.shape)} parameters, at most {', '.join(parts)} (headway doctor has the table)"


def _memory(config: Config) -> _Memory | None:
    from headway.config.sizing.run_memory import processes
    from headway.devices import listed_here, memory_listed_here

    if (shape := _shape(config)) is None:
        return None
    asked, joins = config.cluster.device, config.cluster.address is not None
    on_cpu = asked == "cpu" or (asked == "auto" and not joins and listed_here() == 0)
    there = None if joins else memory_listed_here(on_cpu=on_cpu)
    return _Memory(shape, processes(config, shape, on_cpu=on_cpu, device_bytes=there), on_cpu, there)


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


def _notes_on_devices(config: Config, found: _Memory, there: int) -> Iterator[str]:
    """Yield notes on processes that need more memory than there is, and on vLLM's share of a GPU."""
    from headway.config.sizing.run_memory import replica_room

    for process in found.processes:
        if process.memory.device > there:
            yield (
                f"note: a {process.name} takes up to {size(process.memory.device)}, and a device here has "
                f"{size(there)}; docs/training.md says what to lower"
            )
    try:
        room = replica_room(config, found.shape, there)
    except ConfigError as refused:
        yield f"{PROBLEM}{refused}"
        return
    if config.rollout.name == "vllm" and config.cluster.placement == "shared":
        yield (
            f"note: vLLM takes {size(int(room.share * there))} of each GPU "
            f"(gpu_memory_utilization={room.share:.2f}), {size(room.cache_bytes)} of it for keys and values"
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


MOST_ROWS = 8
"""Maximum number of drawn nodes. If there are more, the first ones and the last one are drawn."""


def nodes_drawn(placement: Placement, parallel: ParallelConfig) -> dict[str, str]:
    """Return node name → a line for each node of the run; empty for one node without device groups.

    Line i has node i of each role. A role's ranks in one line are on one machine, and in different lines on different
    machines. The roles of a line share a machine if there is room.
    """
    count = max(share.node for share in placement.shares) + 1
    if count == 1 and parallel.is_plain and placement.per_replica == 1:
        return {}
    rows = {
        f"node {node}": ", ".join(
            filter(None, (_share(placement, share, parallel) for share in placement.shares if share.node == node))
        )
        for node in range(count)
    }
    lines = {"nodes": f"{count}; a line is one machine, or several where one has no room for all"}
    shown = list(rows.items())
    if len(shown) > MOST_ROWS:
        shown[MOST_ROWS - 2 : -1] = [("…", "")]
    lines |= shown
    across = [group for group in placement.groups(ACTOR, parallel.ep) if placement.straddles(group)]
    if across:
        lines["experts"] = f"ep {parallel.ep} is larger than a node: tokens travel between machines"
    return lines


def _share(placement: Placement, share: NodeShare, parallel: ParallelConfig) -> str:
    """Return the roles of a node share. Roles with the same devices are joined by ``+``."""
    drawn: dict[tuple[int, ...], list[str]] = {}
    for role, devices in placement.devices.items():
        here = share.only(devices).devices
        if not here:
            continue
        first, last = devices.index(here[0]), devices.index(here[-1])
        text = f"{role} {first}" if first == last else f"{role} {first}-{last}"
        if role in (ACTOR, REF, LOGP, CRITIC) and parallel.inner > 1:
            text += f" ({len(here) // parallel.inner} × {_inner(parallel)})"
        elif role == ROLLOUT and placement.per_replica > 1:
            text += f" ({len(here) // placement.per_replica} × tp {placement.per_replica})"
        same = next((other for other in drawn if set(other) & set(here)), here)
        drawn.setdefault(same, []).append(text)
    return ", ".join(" + ".join(texts) for texts in drawn.values())


def _inner(parallel: ParallelConfig) -> str:
    return " · ".join(f"{name} {size}" for name, size in (("cp", parallel.cp), ("tp", parallel.tp)) if size > 1)


def print_resolved(loaded: LoadedConfig) -> None:
    """Print the configuration as a file that loads again: YAML, then the summary and the notes as comments."""
    from headway.config.loading import dump

    typer.echo(dump(loaded.config))
    for name, value in summary(loaded.config).items():
        typer.echo(f"# {name}: {value}")
    if (memory := memory_in_short(loaded.config)) is not None:
        typer.echo(f"# memory: {memory}")
    for note in loaded.notes:
        typer.echo(f"# note: {note}")


def print_summary(loaded: LoadedConfig) -> None:
    """Print the summary of the settings as a table, and the notes."""
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for name, value in summary(loaded.config).items():
        table.add_row(name, value)
    console = Console(markup=False, highlight=False)
    console.print(table)
    lines = list(memory_lines(loaded.config))
    for line in lines:
        console.print(line, soft_wrap=True)
    for note in loaded.notes:
        console.print(f"note: {note}", soft_wrap=True)
    if not any(line.startswith(PROBLEM) for line in lines):
        console.print("no problems found")


def summary(config: Config) -> dict[str, str]:
    """Return label → line of the settings' summary: derived numbers, and the devices of each role."""
    from headway.config.sizing.placement import ROLLOUT, concurrent, resolve_placement
    from headway.pipeline.admission.staleness import admission_limit, lag_bound

    settings, b = config.async_training, config.groups_per_version
    eta, placement = settings.staleness_threshold, resolve_placement(config)
    bound, total = lag_bound(eta, b, config.window, settings.max_lag), config.rollout.total_rollout_steps
    lines = {
        "mode": config.mode,
        "model": config.model.path or f"made here ({config.model.make.architecture if config.model.make else ''})",
        "data": config.data.label,
        "B": f"{b} groups per version: train batches {settings.trigger_parameter_sync_step} × "
        f"mini-batches {settings.require_batches} × groups {config.actor.ppo_mini_batch_size}",
        "η": f"{float(eta):g}: at most {admission_limit(0, eta, b)} groups admitted and not trained",
        "lag": "no bound (order ready)" if bound is None else f"at most {bound} versions",
        "length": f"{config.data.epochs} epochs" if total is None else f"{total} groups = {total // b} versions",
        "slots": f"{concurrent(config)} answers at once on each replica (rollout.max_concurrent"
        + (")" if config.rollout.max_concurrent is not None else ": null)"),
        "saves": checkpoints(config),
        "journal": journal(config),
        "backend": config.cluster.backend,
    }
    each = {ROLLOUT: f"tp {placement.per_replica} "} if placement.per_replica > 1 else {}
    counts = {role: len(on) for role, on in placement.devices.items()} | {ROLLOUT: len(placement.replicas)}
    if config.cluster.backend == "inline":
        return lines | {role: f"{count} × {each.get(role, '')}(this process)" for role, count in counts.items()}
    roles = {
        role: f"{counts[role]} × {each.get(role, '')}({device_range(on)})" for role, on in placement.devices.items()
    }
    lines |= roles | ({"idle": device_range(placement.idle)} if placement.idle else {})
    return lines | nodes_drawn(placement, config.actor.parallel)


def checkpoints(config: Config) -> str:
    """Return the summary's line on checkpoints: how often they are saved, and how many are kept."""
    freq, keep = config.trainer.save_freq, config.trainer.max_actor_ckpt_to_keep
    if freq < 0:
        return "at the end: before that, a run that is killed cannot be resumed (trainer.save_freq)"
    often = "every version" if freq == 1 else f"every {freq} versions"
    line = often if keep is None else f"{often}, the newest {keep} are kept"
    if config.trainer.snapshot is not None:
        line += "; snapshots of the others in memory"
        line += "" if config.cluster.address else ", which on one machine survive processes only"
    return line


def journal(config: Config) -> str:
    """Return the summary's line on the journal: how large it becomes, and what it costs the driver."""
    from headway.config.sizing.run_memory import BYTES_PER_TOKEN
    from headway.data.journal import TOKEN_BYTES

    if not config.writes_journal:
        return "none: a resumed run makes groups that were open again"
    # From the last checkpoint but one on, with what runs ahead, in whole versions.
    versions = 2 * config.trainer.save_freq + 2 + ceil(config.async_training.staleness_threshold)
    data, episodes = config.data, versions * config.groups_per_version * config.rollout.n
    longest = data.max_response_length + (data.max_prompt_length if config.agent.has_program else 0)
    token = TOKEN_BYTES + (BYTES_PER_TOKEN if config.cluster.address else 0)  # groups of other machines, once more
    return f"at most {size(episodes * longest * token)} in run.dir, and 25 µs of the driver for each group"


def device_range(devices: tuple[int, ...]) -> str:
    """Return ascending device numbers in short: ``device 3``, ``devices 0-3`` or ``devices 0-1, 4``."""
    starts = [device for device in devices if device - 1 not in devices]
    ends = [device for device in devices if device + 1 not in devices]
    runs = [f"{start}" if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True)]
    return f"device{'' if len(devices) == 1 else 's'} {', '.join(runs)}"
