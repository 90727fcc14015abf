"""Profiles on disk: YAML in, a checked `Profile` out, and back.

Read with libyaml where it is there: a measured profile has tens of thousands of lengths.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from headway.config.layers import DEFAULTS, flatten, read_file
from headway.config.recipes import find_recipe
from headway.config.schema import Config
from headway.config.schema_messages import explain
from headway.errors import ConfigError
from headway.planner.profiles.job_profile import Profile

if TYPE_CHECKING:
    from yaml import SafeDumper, SafeLoader
    from yaml.nodes import SequenceNode
else:
    SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    SafeDumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def load_profile(path: Path) -> Profile:
    """Read and check a profile.

    Raises:
        ConfigError: the file cannot be read; or, a line each, every key that is wrong, where, and what was expected.
    """
    values = _read(path)
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
    text: str = yaml.dump(
        ordered, Dumper=_ProfileDumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=120
    )
    return text


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; give a profile, a YAML file") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a profile, a YAML file that you may read") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {_problem(error)}") from error
    if content is None:
        raise ConfigError(f"{path}: the file is empty, expected a profile: keys like name, devices, batch")
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values at the top, but got {type(content).__name__}")
    return content


def _problem(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return str(error).strip().splitlines()[0]


class _Loader(SafeLoader):
    """YAML loader in which keys are text, each is given once, and 1e9 is a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "expected a name as a key", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
            seen.add(key.value)
            # YAML 1.1 makes booleans or numbers of some names, such as `on`.
            key.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep=deep)


class _ProfileDumper(SafeDumper):
    """YAML dumper that writes sections as blocks and lists on one line, except lists of text."""


# To YAML 1.1 a number like 1e9 is a text: it wants a point, and a sign in the exponent. Writing knows it, too: a text
# like that gets quotes.
for _kind in (_Loader, _ProfileDumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d[\d_]*)?\.?\d+[eE][-+]?\d+$"), list("-+.0123456789")
    )


def _represent_list(dumper: SafeDumper, data: list[Any]) -> SequenceNode:
    of_text = bool(data) and all(isinstance(item, str) for item in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=not of_text)


_ProfileDumper.add_representer(list, _represent_list)
