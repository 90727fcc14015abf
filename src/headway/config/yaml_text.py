"""YAML of settings and profiles, read without surprises, and written with lists on one line.

1e9 is a number, keys are text, a date is text; a key that is given twice, and a number of base 8 or 60, are errors.
"""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import yaml
from yaml.constructor import ConstructorError, SafeConstructor

from headway.errors import ConfigError

if TYPE_CHECKING:
    from yaml import SafeDumper
    from yaml import SafeLoader as CSafeLoader
else:
    CSafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    SafeDumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

_SURPRISING = re.compile(r"[-+]?(0[0-7_]+|[0-9_]+(:[0-9_.]+)+)")
"""Pattern of numbers that YAML 1.1 reads in base 8 or base 60."""


class _Strict(SafeConstructor):
    """Part of a loader: keys are text, and each is given once; numbers are decimal."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConstructorError(None, None, "expected a name as a key", key.start_mark)
            if key.value in seen:
                raise ConstructorError(None, None, f"found duplicate key {key.value}", key.start_mark)
            seen.add(key.value)
            # YAML 1.1 makes booleans or numbers of some names, such as `on`; `<<` stays, which is no name.
            if not key.tag.endswith(":merge"):
                key.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep=deep)

    def _decimal(self, node: yaml.ScalarNode) -> float:
        if _SURPRISING.fullmatch(node.value):
            raise ConfigError(
                f"line {node.start_mark.line + 1}: {node.value} is another number to YAML, one of base 8 or 60; "
                f'write a decimal number, or "{node.value}" in quotes for a text'
            )
        return self.construct_yaml_int(node) if node.tag.endswith(":int") else self.construct_yaml_float(node)

    yaml_constructors: ClassVar[dict[str | None, Any]] = {
        **SafeConstructor.yaml_constructors,
        "tag:yaml.org,2002:int": _decimal,
        "tag:yaml.org,2002:float": _decimal,
        "tag:yaml.org,2002:timestamp": SafeConstructor.construct_yaml_str,
    }


class Loader(_Strict, yaml.SafeLoader):
    """YAML loader of settings."""


class FastLoader(_Strict, CSafeLoader):
    """YAML loader by libyaml where that is there, for pages of numbers. What is nested without an end kills it."""


class Dumper(SafeDumper):
    """YAML writer: sections as blocks, lists on one line."""


Dumper.add_representer(
    list, lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)
)
for _kind in (Loader, FastLoader, Dumper):
    # To YAML 1.1 a number like 1e9 is a text. Writing knows it, too: a text like that gets quotes.
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d[\d_]*)?\.?\d+[eE][-+]?\d+$"), list("-+.0123456789")
    )


def parse(text: str, loader: type[Loader | FastLoader] = Loader) -> Any:
    """Return the value that a YAML ``text`` is. Raises `ConfigError`, with the line."""
    try:
        return yaml.load(text, loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark is not None else ""
        raise ConfigError(f"not valid YAML: {line}{error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {str(error).strip().splitlines()[0]}") from error
    except RecursionError as error:
        raise ConfigError("not valid YAML: nested too deeply") from error


def read_mapping(path: Path, loader: type[Loader | FastLoader] = Loader) -> dict[str, Any]:
    """Return the mapping that a YAML file is, an empty one of an empty file.

    Raises:
        ConfigError: it cannot be read, or is no mapping.
        FileNotFoundError: there is no such file.
    """
    try:
        if stat.S_ISCHR(path.stat().st_mode) or stat.S_ISBLK(path.stat().st_mode):  # reading a device may never end
            raise ConfigError("a device, not a file; give a YAML file, like recipes/demo.yaml")
        content = parse(path.read_text(encoding="utf-8"), loader)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a YAML file that you may read") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values at the top, as in recipes/demo.yaml")
    return content or {}


def dump(values: dict[str, Any], dumper: type[Dumper] = Dumper) -> str:
    """Return ``values`` as YAML, in their order."""
    text: str = yaml.dump(
        values, Dumper=dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=120
    )
    return text
