"""Commands ``headway train``, ``sft``, ``demo`` and ``doctor``: checking settings, and training with them.

The doctor shows the memory of each kind of process; it and ``--dry-run`` show which ranks are on one machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from headway.cli.common import Debug, Overrides, Static, command, complete_config, say
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
"""Beginning of a line that tells of one."""


class _Memory(NamedTuple):
    """Facts about a run's memory that are known before it starts."""

    shape: ModelShape
    processes: list[RunProcess]
    on_cpu: bool
    device_bytes: int | None
    """Memory of a device of the run; None where it is not known."""


def memory_lines(config: Config) -> Iterator[str]:
    """Yield the lines of the table, of 80 columns at most; none where the model's sizes are not known."""
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
    """Return the table in one line; None where the model's sizes are not known."""
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
    """Say what is more than there is, and what is left for a replica on a GPU, where it takes what it finds."""
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
"""Most nodes that are drawn; of more, the first ones and the last one."""


def nodes_drawn(placement: Placement, parallel: ParallelConfig) -> dict[str, str]:
    """Return a line for each node of the run, by its name; none where there is one node and devices work alone.

    Line i has node i of each role. A role's ranks in one line are on one machine, those in different lines on different
    ones. The roles of a line share a machine where there is room for them.
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
    """Return the roles of a share, with those that have the same devices joined by ``+``."""
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


A_CONFIG = "YAML file of settings, or the name of a recipe that comes with Headway, like demo."
OptionalConfig = Annotated[Path | None, typer.Argument(metavar="CONFIG", help=A_CONFIG, autocompletion=complete_config)]
Resume = Annotated[
    Path | None,
    typer.Option("--resume", metavar="RUN", help="Go on with the run in this directory, from its newest checkpoint."),
]
ResumeAnywhere = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="RUN",
        help="Go on with the run in this directory, or in this storage (a URL), from its newest checkpoint.",
    ),
]
Restarts = Annotated[
    int,
    typer.Option(
        "--restarts",
        min=0,
        metavar="N",
        help="Run in a process of its own, and where that fails or is killed go on from the newest checkpoint, N times "
        "at the most.",
    ),
]
ConfigFile = Annotated[Path, typer.Argument(help=A_CONFIG, autocompletion=complete_config)]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Print the resolved settings, check the data, try reward, loss and program, and stop. --dry-run=static "
        "runs no user code.",
    ),
]


@command
def train(
    config: OptionalConfig = None,
    overrides: Overrides = None,
    resume: ResumeAnywhere = None,
    restarts: Restarts = 0,
    dry_run: DryRun = False,
    static: Static = False,
    debug: Debug = False,
) -> None:
    """Train a model, or resume a run that ended early: CONFIG [a.b=c …], or --resume RUN [a.b=c …]."""
    if resume is not None:
        given = [] if config is None else [str(config)]
        _resume(resume, [*given, *(overrides or [])], dry_run, static, 0 if dry_run else restarts, debug)
    elif config is None:
        raise ConfigError("expected CONFIG, a YAML file or a recipe's name, like demo, or --resume RUN")
    else:
        _train(config, overrides or [], dry_run, static, 0 if dry_run else restarts, debug)


@command
def sft(
    config: OptionalConfig = None,
    overrides: Overrides = None,
    resume: Resume = None,
    dry_run: DryRun = False,
    static: Static = False,
) -> None:
    """Fine-tune model.path on the conversations in data.train: [CONFIG] [a.b=c …], or --resume RUN [a.b=c …]."""
    from headway.api.python_settings import load_checked, load_resumed
    from headway.config.loading import check_changes, dump

    given = list(overrides or [])
    if config is not None and ("=" in str(config) and not config.exists()):
        given, config = [str(config), *given], None
    if resume is not None:
        if config is not None:
            raise typer.BadParameter(f"--resume RUN takes the settings that RUN was begun with; drop {config}")
        before, loaded = load_resumed(resume, given, supervised=True)
        check_changes(before, loaded.config, version=0)  # what depends on the checkpoint, resuming tells
    else:
        loaded = load_checked(config, given, supervised=True)
    from headway.api.run.new_run import set_math_environment
    from headway.cluster.machine.worker_setup import importing

    set_math_environment(loaded.config)  # before torch is imported
    with importing():
        from headway.api.sft.sft_run import check
        from headway.api.sft.sft_run import sft as run
    if dry_run:
        data = check(loaded.config)
        held_out = 0 if data.val is None else len(data.val)
        typer.echo(dump(loaded.config))
        typer.echo(f"# {len(data.train)} conversations, {held_out} held out, {data.steps} optimizer steps")
        for note in filter(None, [data.train.left_out.note(), *data.notes]):
            typer.echo(f"# {note}")
        return
    raise typer.Exit(run(loaded, resume))


@command
def demo(overrides: Overrides = None, dry_run: DryRun = False, static: Static = False) -> None:
    """Train the demonstration model: the recipe demo, wherever this is called."""
    from headway.config.recipes import recipes

    _train(recipes()["demo"], overrides or [], dry_run, static)


def _train(
    config: Path, overrides: list[str], dry_run: bool, static: bool, restarts: int = 0, debug: bool = False
) -> None:
    loaded = load_checked(config, overrides)
    if restarts and loaded.config.trainer.save_freq < 0:
        raise ConfigError(
            f"--restarts={restarts} has no effect with trainer.save_freq={loaded.config.trainer.save_freq}: a run that "
            "fails has no checkpoint then; let it save more often"
        )
    if restarts:
        from headway.cli.restarts import keep_going
        from headway.config.schema_keys import spelled
        from headway.reports.run_directory import free_names

        chosen = loaded.config.run
        # Chosen here, and given to the process: this one has to know which directory to resume.
        place = chosen.dir or next(path for path in free_names(chosen.name) if not path.exists())
        arguments = ["train", str(config), *overrides, f"run.dir={spelled(str(place))}"]
        raise typer.Exit(keep_going(arguments, place, restarts, debug=debug))
    if dry_run:
        _dry_run(loaded, static)
        return
    from headway.cluster.machine.worker_setup import importing

    with importing():
        from headway.api.run import train as run

    raise typer.Exit(run(loaded))


def _resume(given: str, overrides: list[str], dry_run: bool, static: bool, restarts: int, debug: bool) -> None:
    from headway.api.python_settings import load_resumed
    from headway.api.storage.stored_run import located
    from headway.config.loading import check_changes
    from headway.config.schema_keys import spelled

    if files := [override for override in overrides if "=" not in override]:
        raise ConfigError(f"--resume RUN takes the settings that RUN was begun with; drop {files[0]}, or give a.b=c")
    settings = dict(override.split("=", 1) for override in overrides)
    run, url = located(given, settings.get("run.storage"), settings.get("run.dir"), say)
    if url is not None:  # which the directory belongs to from now on
        overrides = [one for one in overrides if not one.startswith(("run.dir=", "run.storage="))]
        overrides.append(f"run.storage={spelled(url)}")
    before, loaded = load_resumed(run, overrides)
    if restarts:
        from headway.cli.restarts import keep_going

        raise typer.Exit(keep_going(["train", "--resume", str(run), *overrides], run, restarts, debug=debug))
    if dry_run:
        check_changes(before, loaded.config, version=0)  # what depends on the checkpoint, resuming tells
        _dry_run(loaded, static)
        return
    from headway.api.run import resume

    raise typer.Exit(resume(run, before, loaded))


def _dry_run(loaded: LoadedConfig, static: bool) -> None:
    from headway.api.checks.trials import check_dry

    print_resolved(loaded)
    for note in check_dry(loaded.config, loads=not static, calls=not static):
        typer.echo(f"# note: {note}")


@command
def doctor(config: ConfigFile, overrides: Overrides = None) -> None:
    """Check settings and say what they amount to."""
    from headway.api.checks.trials import check_dry

    loaded = load_checked(config, overrides or [])
    notes = check_dry(loaded.config)
    print_summary(replace(loaded, notes=[*loaded.notes, *notes]))


def load_checked(path: Path, overrides: list[str]) -> LoadedConfig:
    """Return the configuration as the doctor passed it, with its notes. Raises `ConfigError` for anything wrong."""
    from headway.api.python_settings import load_checked

    try:
        return load_checked(path, overrides)
    except ConfigError:
        from headway.planner.profiles.profile_files import is_profile

        if not is_profile(path):
            raise
        text = f"{path} is a profile, which says what a job costs, and no recipe; give it to headway plan {path}"
        raise ConfigError(text) from None


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
    """Print what the settings amount to, as a table, and the notes."""
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
    """Return the summary of the settings, line by line: the numbers that follow from them, and who runs where."""
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
    """Return the summary's line on the journal: how large it becomes."""
    from headway.data.journal import TOKEN_BYTES

    if not config.writes_journal:
        return "none: a resumed run makes groups that were open again"
    # From the last checkpoint but one on, with what runs ahead, in whole versions.
    versions = 2 * config.trainer.save_freq + 2 + ceil(config.async_training.staleness_threshold)
    data, episodes = config.data, versions * config.groups_per_version * config.rollout.n
    longest = data.max_response_length + (data.max_prompt_length if config.agent.has_program else 0)
    return f"at most {size(episodes * longest * TOKEN_BYTES)} in run.dir"


def device_range(devices: tuple[int, ...]) -> str:
    """Return ascending device numbers in short: ``device 3``, ``devices 0-3`` or ``devices 0-1, 4``."""
    starts = [device for device in devices if device - 1 not in devices]
    ends = [device for device in devices if device + 1 not in devices]
    runs = [f"{start}" if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True)]
    return f"device{'' if len(devices) == 1 else 's'} {', '.join(runs)}"
