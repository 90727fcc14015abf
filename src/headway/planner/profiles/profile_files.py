"""Profiles on disk: YAML in, a checked `Profile` out, and back."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from yaml.nodes import SequenceNode

from headway.config import yaml_text
from headway.config.layers import flatten
from headway.config.recipes import find_recipe
from headway.config.schema_messages import explain
from headway.errors import ConfigError
from headway.planner.profiles.job_profile import Profile


def load_profile(path: Path) -> Profile:
    """Read and check a profile: a file, or one that comes with Headway by its name.

    Raises:
        ConfigError: the file cannot be read; or, a line each, every key that is wrong, where, and what was expected.
    """
    try:
        # Quickly: a measured profile has tens of thousands of lengths.
        values = yaml_text.read_mapping(find_recipe(path), yaml_text.FastLoader)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; give a profile, a YAML file") from None
    if not {"devices", "batch", "response"} & values.keys():
        raise ConfigError(
            f"{path} is not a profile, which says what a job costs; a short run makes one: headway profile RUN"
        )
    try:
        return Profile.model_validate(values)
    except ValidationError as error:
        written = {key: "" for key, _ in flatten(values)}
        problems = explain(error, written, root=Profile).replace("\n", "\n  ")
        raise ConfigError(f"{path} is not a profile yet:\n  {problems}") from error


def is_profile(path: Path) -> bool:
    """Tell whether ``path``, or the file of ours that it names, is a profile."""
    with suppress(ConfigError):
        return find_recipe(path).is_file() and bool(load_profile(path))  # a pipe that was read would be waited for
    return False


def dump_profile(profile: Profile) -> str:
    """YAML that loads back to an equal profile. What equals its default is left out; lists are on one line."""
    values = profile.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    # Recorded lengths are pages long: what a reader looks for should stand above them.
    lengths = ("prompt", "response")
    ordered = {k: v for k, v in values.items() if k not in lengths} | {k: values[k] for k in lengths}
    return yaml_text.dump(ordered, _Dumper)


class _Dumper(yaml_text.Dumper):
    """YAML writer that gives each sentence of a list a line of its own."""


def _represent_list(dumper: _Dumper, data: list[Any]) -> SequenceNode:
    of_text = bool(data) and all(isinstance(item, str) for item in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=not of_text)


_Dumper.add_representer(list, _represent_list)
