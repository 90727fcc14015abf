"""Profiles on disk: YAML in, a checked `Profile` out, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError
from yaml.nodes import SequenceNode

from headway.config import yaml_text
from headway.config.layers import DEFAULTS, flatten, read_file
from headway.config.recipes import find_recipe
from headway.config.schema import Config
from headway.config.schema_messages import explain
from headway.errors import ConfigError
from headway.planner.profiles.job_profile import Profile


def load_profile(path: Path) -> Profile:
    """Read and check a profile.

    Raises:
        ConfigError: the file cannot be read; or, a line each, every key that is wrong, where, and what was expected.
    """
    try:
        # Quickly: a measured profile has tens of thousands of lengths.
        values = yaml_text.read_mapping(path, yaml_text.FastLoader)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; give a profile, a YAML file") from None
    try:
        return Profile.model_validate(values)
    except ValidationError as error:
        written = {key: "" for key, _ in flatten(values)}
        problems = explain(error, written, root=Profile).replace("\n", "\n  ")
        raise ConfigError(f"{path} is not a profile yet:\n  {problems}") from error


def read_profile(path: Path) -> Profile:
    """Read a profile. Raises `ConfigError` as `load_profile` does; says so if it is a recipe or a run."""
    try:
        return load_profile(find_recipe(path))
    except ConfigError:
        if (path / "events.jsonl").is_file():
            raise ConfigError(
                f"{path} is a run's directory; plan from its record with: headway plan --from {path}"
            ) from None
        if _more_of_a_recipe(path) <= 0:
            raise
        raise ConfigError(
            f"{path} is a recipe, and a plan needs a profile first: what a step, a token and an answer of the job "
            f"cost. A short run measures that. Give:\n  headway train {path} run.dir=RUN\n"
            "  headway profile RUN -o profile.yaml\n  headway plan profile.yaml"
        ) from None


def is_profile(path: Path) -> bool:
    """Tell whether ``path``, or the file of ours that it names, is a profile."""
    file = find_recipe(path)
    return file.is_file() and _more_of_a_recipe(file) < 0  # a pipe that was read already would be waited for


def _more_of_a_recipe(path: Path) -> int:
    """Return how many more of the file's keys are those of a configuration for ``headway train`` than a profile's."""
    try:
        given = {key.partition(".")[0] for layer in read_file(path) for key in layer.values}
    except ConfigError:
        return 0
    profiles = {field.alias or name for name, field in Profile.model_fields.items()}
    return len(given & {DEFAULTS, *Config.model_fields}) - len(given & profiles)


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
