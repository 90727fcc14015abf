"""Commands ``headway init`` and ``import``: a recipe for a model and data, or from files of other projects."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.common import Overrides, check_writable, command, writing
from headway.errors import ConfigError, DataError, ModelError, boundary

if TYPE_CHECKING:
    from headway.api.init.data_summary import DataFacts
    from headway.api.init.model_summary import Machine, ModelFacts
    from headway.config.schema import Config

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face folder, or a name on the hub.")]
Data = Annotated[
    str,
    typer.Argument(
        metavar="DATA",
        help="A data file, a dataset's folder or name on the hub, or a task like reasoning_gym/chain_sum.",
    ),
]


@command
def init(
    model: Model,
    data: Data,
    overrides: Overrides = None,
    reward: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="file.py:function, or a built-in reward. Default: by the data's answers."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=0, help="GPUs of the run; default: those of this machine. 0: CPUs.")
    ] = None,
    gpu_gb: Annotated[
        float | None,
        typer.Option("--gpu-gb", min=1, metavar="GB", help="Memory of a GPU; default: of those here, or 80."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Default: MODEL-DATA.yaml in this folder.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE where it is there already.")] = False,
) -> None:
    """Look at a model and data, and write a recipe for them: lengths, reward, devices, batch, each with its reason."""
    name = _name(model, data)
    path = output or Path(f"{name}.yaml")
    if path.exists() and not force:
        raise ConfigError(f"{path} is there already; give --force to replace it, or another file with -o")
    read_here = [] if path.suffix == ".yaml" else [Path(model).expanduser(), Path(data).expanduser()]
    check_writable("--output", path, read_here)  # no model and no data is YAML
    given, function = _given(model, data, overrides or [], reward)

    from headway.api.init.data_summary import look_at_data
    from headway.api.init.device_layout import taken
    from headway.api.init.model_summary import look_at_model, look_here
    from headway.api.init.recipe_builder import choose, render
    from headway.cli.settings_summary import size

    machine = look_here(gpus, gpu_gb)
    with boundary(f"{model} cannot be read", ModelError):
        looked = look_at_model(model, trust_remote_code=bool(given.get("model.trust_remote_code", False)))
    read = look_at_data(data, looked, function, given)
    choices = choose(looked, read, machine, given, name=name)
    memory = [f"{one.name} {size(one.memory.device)}" for one in taken(choices, looked, machine)]
    vllm = any((one.key, one.value) == ("rollout.name", "vllm") for one in choices)
    options = {"--reward": reward, "--gpus": gpus, "--gpu-gb": gpu_gb, "--output": output}
    words = [
        model,
        data,
        *(overrides or []),
        *(f"{key}={value}" for key, value in options.items() if value is not None),
    ]
    of_llama = " of a Llama of its size" if looked.estimated else ""
    takes = "; vLLM takes what it finds." if vllm else "."
    header = [
        f"A first recipe, for {machine.words}:",
        f"  {shlex.join(['headway', 'init', *words])}",
        "To check it, and to train:",
        *(f"  {line}" for line in _next(path)),
        f"Memory{of_llama}, at most: {', '.join(memory)}{takes}",
    ]
    text = render(choices, header)
    # Before it is written: a recipe that would be refused leaves no file.
    _check(text, looked)
    with writing("--output", path):
        path.write_text(text, encoding="utf-8")
    _say(path, text, looked, read, machine)


def _name(model: str, data: str) -> str:
    """Return a name for the run and its recipe, from the names of model and data."""
    parts = (Path(model).name, Path(data.partition(":")[0]).stem if Path(data).suffix else Path(data).name)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts)).strip("-.").lower() or "recipe"


def _given(model: str, data: str, overrides: Sequence[str], reward: str | None) -> tuple[dict[str, Any], str | None]:
    """Return the user's settings, flat, and the reward's function, which may be one of them.

    Raises:
        ConfigError: a setting is invalid, or is already determined by MODEL or DATA.
    """
    from headway.api.checks.preflight import go_offline_without_a_hub
    from headway.api.init.data_summary import source_of
    from headway.config.layers import Layer, lies_in, read_overrides
    from headway.config.loading import load, resolved
    from headway.config.schema import PROGRAM

    typed = read_overrides(overrides)
    with boundary(f"{data} cannot be read", DataError):
        source = source_of(data)
    given = dict(typed.values)
    for key in given:
        if lies_in(key, "model.path", "model.make", "model.warmup"):
            raise ConfigError(f"{key}: MODEL says which model is trained; drop it")
        if key in ("data.train", "data.train.dataset", "data.train.path", "data.task.name") or (
            "data.train" in source and lies_in(key, "data.train")
        ):
            raise ConfigError(f"{key}: DATA says what is read; drop it")
        if lies_in(key, "reward.functions"):
            raise ConfigError("reward.functions: give one reward here, and write the others into the recipe")
    loaded: Config = load(None, Layer(typed.origin, {"model.path": model, **source, **given})).config
    given = resolved(loaded, given)
    go_offline_without_a_hub(loaded)
    if "reward.function" in given:
        if reward is not None:
            raise ConfigError("reward.function and --reward are both given; drop one of them")
        reward = str(given.pop("reward.function"))
    return given, PROGRAM if reward is None and loaded.reward.by_program else reward


def _next(path: Path) -> list[str]:
    return [f"headway train {shlex.quote(str(path))} --dry-run", f"headway train {shlex.quote(str(path))}"]


def _check(text: str, model: ModelFacts) -> None:
    """Check the recipe as the doctor does. A model that lacks weights or a tokenizer is not opened."""
    from headway.api.checks.trials import check_dry
    from headway.cli.train_command import load_checked

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(text, encoding="utf-8")
        config = load_checked(file, []).config
    check_dry(config, model_there=not model.lacks)


def _say(path: Path, text: str, model: ModelFacts, data: DataFacts, machine: Machine) -> None:
    """Print the recipe's model, data and devices, and the next commands."""
    typer.echo(f"{model.family}, {model.size} parameters; {data.rows} rows; {machine.words}")
    typer.echo(f"recipe: {path} ({len(text.splitlines())} lines, each choice with its reason)")
    if model.lacks:
        typer.echo(f"{model.path} has no {' and no '.join(model.lacks)} yet: until then, a dry run refuses the recipe")
    elif not machine.here:
        typer.echo("not checked: whether there are such GPUs where it will run")
    typer.echo("now:")
    for line in _next(path):
        typer.echo(f"  {line}")


@command
def import_files(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="A shell script, a YAML, TOML or Python file, a command line in quotes, or - for standard input. "
            "Of several, later ones lie on earlier ones.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the recipe there; default: print it.")
    ] = None,
    project: Annotated[
        str | None,
        typer.Option("--from", metavar="PROJECT", help="verl, trl, areal, prime-rl or openrlhf; default: by the keys."),
    ] = None,
) -> None:
    """Turn a file of verl, TRL, AReaL, prime-rl or OpenRLHF into a recipe, with a report on each setting."""
    from headway.api.checks.preflight import missing_packages
    from headway.config.migration.settings_files import read
    from headway.config.migration.translation import recipe, recognise, report, translate

    sources = [read(file) for file in files]
    found = translate(recognise(sources, project), sources)
    found.open += missing_packages(found.config)
    if output is None:
        typer.echo(report(found), nl=False, err=True)
        typer.echo(recipe(found, None), nl=False)
        return
    check_writable("--output", output, [Path(source.name) for source in sources])
    with writing("--output", output):
        output.write_text(recipe(found, str(output)), encoding="utf-8")
    typer.echo(report(found), nl=False)
    typer.echo(f"\nrecipe: {output}\nnow: headway doctor {output}")
