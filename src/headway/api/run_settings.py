"""Checked settings of a new or resumed run, for command line and Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from headway.cluster.hardware import available_cores
from headway.config.doctor.doctor import diagnose
from headway.config.doctor.machine_advice import machine_notes
from headway.config.layers import Layer
from headway.config.loading import LoadedConfig, load
from headway.config.schema import Config
from headway.devices import listed_here
from headway.errors import ConfigError
from headway.reports.run_directory import RunDirectory


def load_checked(path: Path | None, overrides: Sequence[str] | Layer = (), *, supervised: bool = False) -> LoadedConfig:
    """Return the configuration as the doctor passed it, with its notes, for ``headway sft`` if ``supervised``.

    Raises `ConfigError` for anything wrong.
    """
    if path is not None and "=" in str(path) and not path.exists():
        raise ConfigError(f"expected CONFIG, a YAML file, before the settings, but the first argument is {path}")
    loaded = load(path, overrides)
    if loaded.config.data.accept_changes:
        raise ConfigError("data.accept_changes: it has no effect on a new run; it is for --resume RUN")
    return _diagnosed(loaded, supervised)


def load_resumed(
    run: Path, overrides: Sequence[str] | Layer = (), *, supervised: bool = False
) -> tuple[Config, LoadedConfig]:
    """Return the configuration of the run in the directory ``run`` so far, and the checked one that holds from now on.

    ``supervised``: it is a run of ``headway sft``.

    Raises:
        UserError: there is no run.
        ConfigError: a setting is wrong.
    """
    directory = RunDirectory.existing_sft(run) if supervised else RunDirectory.existing(run)
    # The run wrote its file itself: a setting without effect after a change is no mistake of the user's.
    loaded = load(directory.config, overrides)
    loaded = _diagnosed(replace(loaded, user_keys=loaded.typed_keys), supervised)
    return load(directory.config).config, loaded


def _diagnosed(loaded: LoadedConfig, supervised: bool) -> LoadedConfig:
    notes = diagnose(loaded, supervised=supervised)
    return replace(loaded, notes=notes if supervised else [*notes, *notes_on_this_machine(loaded.config)])


def notes_on_this_machine(config: Config) -> list[str]:
    return list(machine_notes(config, cores=available_cores(), gpus=listed_here()))
