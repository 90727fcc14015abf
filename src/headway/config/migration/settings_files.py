"""Reading of files: from a path or a command line to settings by dotted key, with their values as written."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from math import prod
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from headway.config.conditions import with_texts
from headway.config.migration.python_configs import read_code
from headway.config.migration.shell_scripts import ShellScript, read_script, unresolved, written
from headway.config.migration_tables.projects import OPENRLHF, TRL, VERL
from headway.config.migration_tables.trl import CONFIG, PROCESSES
from headway.config.migration_tables.verl import FULLY_ASYNC, ONE_STEP_OFF, PPO, PROGRAM
from headway.errors import ConfigError

KINDS = "a shell script, a YAML, TOML or Python file, or a command line in quotes"
_SETTING = re.compile(r"^([+~]*)([A-Za-z_][\w./@-]*)=(.*)$", re.DOTALL)
_COMMAND = r"^[^\n#]*(?:\\\n[^\n]*)*{}(?:[^\n]*\\\n)*[^\n]*--[^\n]*$"
"""Pattern of a command, with its continuation lines, that has a script's name and options after it."""
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_OF_ENVIRONMENT = re.compile(r"\$\{(oc\.env:[^${}]*)\}")
_OPEN, _CLOSE = "\ue002", "\ue003"
"""Marks around what `_OF_ENVIRONMENT` finds, so that it is not resolved."""
_PROGRAMS = (
    ("fully_async", FULLY_ASYNC),
    ("one_step_off", ONE_STEP_OFF),
    ("verl.", PPO),
    ("main_ppo", PPO),
    ("main_dapo", PPO),
)
"""Part of a command's module name → verl's program."""
_TRAINS = ("ppo", "dapo", "fully_async", "one_step_off")
"""Parts of the module name of a command that trains. Other commands prepare data or evaluate."""


@dataclass(slots=True)
class SettingsFile:
    """One file: its name, its settings in order, the project if the file names it, remarks, and files it refers to."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    project: str = ""
    remarks: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)


def read(given: str) -> SettingsFile:
    """Read a file, ``-`` for standard input, or a command line.

    Raises:
        ConfigError: there is no such file, or its content does not fit its extension.
    """
    if given == "-":
        return _of_whole_script(sys.stdin.read(), SettingsFile("standard input"))
    path = Path(given).expanduser()
    try:
        there = path.exists()
    except OSError:  # a long command line is not a valid file name
        there = False
    # The file first: its path may contain blanks.
    if " " in given.strip() and not there:
        return _of_whole_script(given, SettingsFile("the command line"))
    text, source = _text(path), SettingsFile(str(path))
    match path.suffix.lower():
        case ".yaml" | ".yml":
            return _of_yaml(text, source)
        case ".toml":
            try:
                source.settings = dict(_flat(tomllib.loads(text)))
            except (tomllib.TOMLDecodeError, RecursionError) as error:
                raise ConfigError(f"{path}: not valid TOML: {_first_line(error)}") from error
            return source
        case ".py":
            return _of_code(text, source, path)
        case ".json" | ".jsonl" | ".parquet" | ".ipynb" | ".csv" | ".safetensors":
            raise ConfigError(f"{path}: a {path.suffix} file; expected {KINDS}")
    try:
        return _of_whole_script(text, source)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _text(path: Path) -> str:
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8")
        what = "a directory" if path.is_dir() else "not a file" if path.exists() else "there is no such file"
    except UnicodeDecodeError:
        what = "not a text file in UTF-8"
    except OSError as error:
        what = error.strerror or str(error)
    raise ConfigError(f"{path}: {what}; expected {KINDS}")


def _of_yaml(text: str, source: SettingsFile) -> SettingsFile:
    # Before OmegaConf, which would put this machine's variables into the recipe.
    text = _OF_ENVIRONMENT.sub(rf"{_OPEN}\1{_CLOSE}", text)
    try:
        content = OmegaConf.create(text) if text.strip() else OmegaConf.create({})
    except (yaml.YAMLError, OmegaConfBaseException, RecursionError, ValueError, AssertionError) as error:
        raise ConfigError(f"{source.name}: not valid YAML: {_first_line(error)}") from error
    if not isinstance(content, DictConfig):
        raise ConfigError(f"{source.name}: expected a mapping of keys to values at the top")
    source.settings = dict(_resolved(content))
    named = f"{source.settings.get('defaults')} {source.settings.get('hydra.searchpath')}"
    if "ppo_trainer" in named or "ppo_megatron_trainer" in named or "verl/" in named:
        source.project = VERL.name
    return source


def _resolved(content: DictConfig) -> Iterator[tuple[str, Any]]:
    """Yield a YAML file's settings, with references to its own keys resolved.

    This machine's environment is not read: ``${oc.env:NAME}`` stays, unless it has a default that is not text.
    """
    # Key by key: a dangling reference must not keep the others from being resolved.
    raw: Any = OmegaConf.to_container(content, resolve=False)
    for key, text in _flat(raw):
        try:
            found = OmegaConf.select(content, key, default=text, throw_on_missing=True)
            value = OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
        except (OmegaConfBaseException, RecursionError):
            value = unresolved(str(_as_written(str(text))))
        yield from _flat({key: with_texts(value, _as_written)})


def _as_written(text: str) -> Any:
    if alone := re.fullmatch(f"{_OPEN}oc.env:[^,{_CLOSE}]*,([^{_CLOSE}]*){_CLOSE}", text):
        default = _value(alone[1].strip())
        if isinstance(default, bool | int | float):
            return default
    return text.replace(_OPEN, "${").replace(_CLOSE, "}")


def _of_code(text: str, source: SettingsFile, path: Path) -> SettingsFile:
    described = re.search(_COMMAND.format(re.escape(path.name)), text.replace("\\\\\n", "\\\n"), re.MULTILINE)
    options: dict[str, Any] = {}
    with suppress(ConfigError):  # the description need not be a command
        options = _of_script(described[0] if described else "", SettingsFile(source.name)).settings
    settings, source.remarks = read_code(text, path, options)
    source.settings = options | settings
    if not any(name in text for name in ("GRPO", "RLOO")) or not source.settings:
        raise ConfigError(f"{path}: calls no GRPOConfig and no GRPOTrainer; of Python, files for TRL are read")
    if options:
        source.remarks.append("options of the first command that it describes are taken, too")
    source.project = TRL.name
    return source


def _of_whole_script(text: str, source: SettingsFile) -> SettingsFile:
    """Read a script that is given alone. Raises `ConfigError` if all its settings are in another file."""
    _of_script(text, source)
    if source.files and set(source.settings) <= {CONFIG, PROCESSES}:
        raise ConfigError(f"its settings are in {written(source.files[0])}; expected that file itself")
    return source


def _of_script(text: str, source: SettingsFile) -> SettingsFile:
    script = read_script(text)
    source.remarks += script.remarks
    flagged = [settings for command in script.commands if (settings := dict(_flags(command, source)))]
    if runs := list(_runs(script)):
        trains = [run for run in runs if any(part in word for word in run for part in _TRAINS)]
        if len(runs) > 1:
            source.remarks.append(f"of {len(runs)} commands with settings the last one that trains counts")
        command = (trains or runs)[-1]
        if any(at and "." in at[2] for at in map(_SETTING.match, command)):
            named = [program for word in command if "=" not in word for part, program in _PROGRAMS if part in word]
            for program in named[:1]:
                source.settings[PROGRAM], source.project = program, VERL.name
        source.settings |= _overrides(command)
    if flagged:
        source.settings |= flagged[-1]
        if len(flagged) > 1:
            source.remarks.append(f"of {len(flagged)} commands the last one counts")
    for command in script.commands:
        words = [part for word in command for part in (word.split("=") if word.startswith("--config=") else [word])]
        for word, file in pairwise(words):
            if word in ("--config", "@", "--config-name") and file:
                source.files.append(file)
                source.remarks.append(f"{word} {file}: its settings are not read; give that file, too, before this")
    return source


def _runs(script: ShellScript) -> Iterator[list[str]]:
    """Yield the commands with settings. A line that lacks its continuation backslash by mistake is joined."""
    run: list[str] = []
    for command in script.commands:
        if not _overrides(command):
            continue
        if run and not _SETTING.match(command[0]):
            yield run
            run = []
        run = run + command
    if run:
        yield run


def _overrides(command: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a verl command, as Hydra reads them.

    A name without a section counts only after the program that the first setting with a section belongs to.
    """
    settings: dict[str, Any] = {}
    found = [_SETTING.match(word) for word in command]
    first = next((i for i, at in enumerate(found) if at and ("." in at[2] or "@" in at[2] or at[1])), len(command))
    start = max((i for i in range(first) if not found[i]), default=-1)
    for word in command[start + 1 :]:
        if at := _SETTING.match(word):
            settings[at[1] + at[2]] = _value(at[3])
        elif word.startswith("~") and "." in word and "/" not in word:  # Hydra's form for a removed key
            settings[word] = None
    return settings


def _flags(command: Sequence[str], source: SettingsFile) -> Iterator[tuple[str, Any]]:
    """Yield the options of a command of TRL, OpenRLHF or prime-rl, as settings."""
    start = next(
        (i for i, word in enumerate(command) if word.endswith(".py") or word.startswith("openrlhf.cli.train_ppo")), None
    )
    if "trl" in command and any(word in ("grpo", "rloo") for word in command):
        start = next(i for i, word in enumerate(command) if word in ("grpo", "rloo"))
        yield CONFIG, "RLOOConfig" if command[start] == "rloo" else "GRPOConfig"
    elif "rl" in command[:4] and any(word in ("uv", "rl") for word in command[:2]):
        start = command.index("rl")
    if start is None or not any(word.startswith("--") for word in command[start:]):
        return
    if "openrlhf" in command[start]:
        source.project = OPENRLHF.name
    yield from _processes(command[:start])
    words = [word for word in command[start + 1 :] if not (_SETTING.match(word) and not word.startswith("-"))]
    for i, word in enumerate(words):
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name in ("config", "config_file"):
            continue
        values = [_value(after) for after in takewhile(lambda one: not one.startswith("--"), words[i + 1 :])]
        yield name.replace("-", "_"), _value(value) if equals else (values[0] if len(values) == 1 else values or True)


def _processes(launcher: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the number of processes that a launcher starts: for accelerate on all machines, for torchrun per node."""
    options = {}
    for word, after in zip(launcher, [*launcher[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        options[name.replace("_", "-")] = _value(value if equals else after)
    if "--num-processes" in options:
        yield PROCESSES, options["--num-processes"]
    elif {"--nproc-per-node", "--nnodes"} & set(options):
        counts = [options.get("--nnodes", 1), options.get("--nproc-per-node", 1)]
        said = " × ".join(map(written, counts))
        yield PROCESSES, prod(counts) if all(type(count) is int for count in counts) else unresolved(said)


def _flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten sections; lists of sections get an index, as in ``env[0].id``."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{key}.")
        elif isinstance(value, list) and value and all(isinstance(one, Mapping) and one for one in value):
            for i, one in enumerate(value):
                yield from _flat(one, f"{key}[{i}].")
        else:
            yield key, _number(value)


def _value(text: str) -> Any:
    """Read a command-line value as YAML, with numbers like ``1e-6``."""
    try:
        value = yaml.safe_load(text) if text else ""
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    return text if isinstance(value, Mapping) and not text.lstrip().startswith("{") else _number(value)


def _number(value: Any) -> Any:
    # A text of digits was in quotes: otherwise YAML makes it a number.
    if isinstance(value, str) and _NUMBER.fullmatch(value) and not value.isdigit():
        return float(value)
    return value


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
