"""Layers: settings of one file, or of the command line. A layer is flat, ``{"rollout.n": 8}``, and has an origin.

defaults' files ─▶ the file ─▶ the command line        each later layer overrides the earlier ones
"""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from headway.config.aliases import canonical_key, translate
from headway.config.conditions import with_texts
from headway.config.recipes import find_recipe, similar_recipes
from headway.errors import ConfigError

DEFAULTS = "defaults"
ON_COMMAND_LINE = "on the command line"
"""Origin of settings, for messages."""
MAPPINGS = (
    *("model.warmup.params", "data.task.params", "data.chat_template_kwargs", "reward.params"),
    *(
        "reward.functions.params",
        "rollout.logit_bias",
        "rollout.engine_kwargs",
        "agent.mcp",
        "agent.params",
        "agent.env",
    ),
)
"""Keys of mappings whose names the user chooses. A dot in such a name is part of it."""
DOT = "\u2024"
"""Character in dotted keys that stands for a dot within a name, and looks like one."""
_SURPRISING = re.compile(r"[-+]?(0[0-7_]+|[0-9_]+(:[0-9_.]+)+)")
"""Pattern of texts that YAML 1.1 reads as numbers in base 8 or base 60."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of settings: ``values`` by dotted key.

    An empty mapping and null are values: they remove what earlier layers set below the key.

    ``origin``: place where the values are written, such as "in demo.yaml" or "on the command line".
    """

    origin: str
    values: Mapping[str, Any]
    file: Path | None = None
    """File that the layer was read from; None for the command line and for Python."""
    notes: tuple[str, ...] = ()
    """Remarks on renamed keys."""

    def without(self, *sections: str) -> Layer:
        """Return the layer without these keys and all keys below them."""
        return Layer(self.origin, {key: v for key, v in self.values.items() if not lies_in(key, *sections)})

    def gives(self, *sections: str) -> bool:
        """Tell whether any of these keys, or a key below them, has a value other than null and an empty list."""
        return any(value not in (None, []) and lies_in(key, *sections) for key, value in self.values.items())


def lies_in(key: str, *sections: str) -> bool:
    """Tell whether ``key`` is one of ``sections`` or a key below it."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def read_file(path: Path) -> list[Layer]:
    """Read the layers of a YAML file: first those of the files in its ``defaults:`` (relative to it), then its own.

    If there is no such file, ``path`` or an entry of ``defaults:`` may be the name of a recipe.

    Raises:
        ConfigError: a file is missing, is not a YAML mapping, repeats a key, or includes itself.
    """
    return list(_read(find_recipe(path), ()))


def read_overrides(overrides: Sequence[str]) -> Layer:
    """Return the layer of the command line's ``a.b=c`` arguments. A later argument replaces an earlier one.

    Raises:
        ConfigError: an argument has no ``=``; its value is not valid YAML; or one gives a value and another a key below
            it.
    """
    last: dict[str, str] = {}
    for override in overrides:
        key = canonical_key(override.partition("=")[0].strip())
        last.pop(key, None)  # so that the later argument also comes later in the order
        last[key] = override
    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    notes: list[str] = []
    for override in last.values():
        translated, remarks = translate(_parse_override(override), ON_COMMAND_LINE)
        notes += remarks
        for key, value in translated.items():
            clash = next((other for other in values if _excludes(other, values[other], key, value)), key)
            if clash != key:
                raise ConfigError(
                    f"{written[clash]!r} and {override!r}: {key} and {clash} cannot both be given on the command line; "
                    "drop one of them"
                )
            values[key], written[key] = value, override
    return Layer(ON_COMMAND_LINE, values, notes=tuple(notes))


def settings_of(overrides: Sequence[str] | Layer) -> Layer:
    """Return the layer over a file's: read from command-line arguments, or given as a layer.

    Raises `ConfigError` as `read_overrides` does.
    """
    return overrides if isinstance(overrides, Layer) else read_overrides(overrides)


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two flat mappings. Keys of ``above`` replace equal keys of ``below``, and keys above or below them.

    An empty mapping in ``below`` stays: it clears the layers under both.
    """
    # Keys below a new one go as well: model.make=null removes model.make.head_dim.
    kept = {key: value for key, value in below.items() if not any(_replaces(new, key, value) for new in above)}
    return kept | dict(above)


def flatten(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten ``{"rollout": {"n": 8}}`` to ``("rollout.n", 8)``. Lists and empty mappings are values.

    Names in `MAPPINGS` keep their dots, as `DOT`; `nest` restores them.
    """
    named = lies_in(canonical_key(prefix[:-1]), *MAPPINGS)
    for given, value in values.items():
        # Otherwise the user's {"x.y": 1} would come back as {"x": {"y": 1}}.
        name = str(given).replace(".", DOT) if named else given
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nest ``{"rollout.n": 8}`` as ``{"rollout": {"n": 8}}``."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = (part.replace(DOT, ".") for part in key.split("."))
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        # {} clears earlier layers, and must not remove other keys of the same section.
        if value != {} or name not in node:
            node[name] = value
    return tree


def resolve_references(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested mapping with every ``${a.b}`` replaced by the value of ``a.b`` in the layers.

    Raises:
        ConfigError: a reference names a key that no layer gives.
    """
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(nest(values)), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{error.full_key}: {_first_line(error)}; ${{a.b}} stands for the value that a file or setting gives a.b"
        ) from error
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _read(path: Path, including: tuple[Path, ...]) -> Iterator[Layer]:
    resolved = path.resolve()
    # By the resolved path: a link to an including file would be followed for ever.
    if resolved in including:
        raise ConfigError(f"{path}: includes itself, by way of {' and '.join(map(str, including))}")
    # x-…: keys for YAML's anchors, as in docker-compose.
    content = {key: value for key, value in _parse_file(path, including).items() if not str(key).startswith("x-")}
    defaults = content.pop(DEFAULTS, [])  # a key of the file, not a setting
    if not isinstance(defaults, list) or not all(isinstance(name, str) for name in defaults):
        raise ConfigError(f"{path}: {DEFAULTS}: got {defaults!r}, expected a list of YAML files, relative to this one")
    for name in defaults:
        yield from _read(find_recipe(Path(name), beside=path), (*including, resolved))
    flat: dict[str, Any] = {}
    for key, value in flatten(content):
        if clash := next((other for other in flat if _excludes(other, flat[other], key, value)), None):
            raise ConfigError(f"{path}: {key} and {clash} cannot both be given; drop one of them")
        flat[key] = value
    try:
        own, notes = translate(flat, f"in {path}", of_a_run=_is_a_runs(path))
        yield Layer(f"in {path}", own, path, tuple(notes))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _is_a_runs(path: Path) -> bool:
    """Tell whether a run wrote this file. Its old names and values are then upgraded silently."""
    return path.name == "config.yaml" and any(
        (path.parent / name).exists() for name in ("events.jsonl", "metrics.jsonl")
    )


def _parse_file(path: Path, including: tuple[Path, ...] = ()) -> dict[Any, Any]:
    """Parse one YAML configuration file. ``including``: the files whose ``defaults`` led to it."""
    try:
        if stat.S_ISCHR(path.stat().st_mode) or stat.S_ISBLK(path.stat().st_mode):  # reading a device may never end
            raise ConfigError(f"{path}: a device, not a file; give a YAML file, like recipes/demo.yaml")
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            return {}
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{path}: expected a mapping of keys to values at the top, as in recipes/demo.yaml")
        # On the nodes: as values 010 is 8 and 1:30 is 90, without the original text.
        _check_numbers(root, lambda line: f"{path}: line {line}")
        # Not yaml.safe_load: it reads 1e-6 as text, and accepts a key that is given twice.
        content = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except FileNotFoundError:
        if including:
            named = f"{DEFAULTS} of {including[-1]} name it, relative to their file"
            raise ConfigError(f"{path}: there is no such file; {named}") from None
        meant = " or ".join(similar_recipes(path)) or "demo"
        raise ConfigError(
            f"{path}: there is no such file; give a YAML file, or the name of a recipe that comes with Headway, like "
            f"{meant} (headway recipes lists them)"
        ) from None
    except OSError as error:
        give = next(path.glob("config.yaml"), "a YAML file that you may read")  # if it is a run
        raise ConfigError(f"{path}: {error.strerror}; give {give}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8") from error
    except (YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {_yaml_problem(error)}") from error
    assert isinstance(content, dict)
    return content


def _parse_override(override: str) -> dict[str, Any]:
    key, equals, value = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"{override!r}: expected a.b=c, like rollout.n=8")
    try:
        _check_numbers(yaml.compose(value, Loader=yaml.SafeLoader), lambda _: f"{override!r}")
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]), resolve=False)
    except (YAMLError, OmegaConfBaseException) as error:
        problem = error.problem if isinstance(error, MarkedYAMLError) else _first_line(error)
        raise ConfigError(f"{override!r}: the value is not valid YAML: {problem}") from error
    assert isinstance(parsed, dict)
    # YAML reads `a:` and `a: b` as mappings, where a text was meant.
    if isinstance(parsed["value"], dict) and not value.lstrip().startswith(("{", "$")):
        raise ConfigError(
            f"{override!r}: a value with a colon at its end, or before a space, needs quotes, as in '\"a:\"'"
        )
    return dict(flatten({key.strip(): parsed["value"]}))


def _check_numbers(root: yaml.Node | None, where: Callable[[int], str]) -> None:
    """Refuse bare numbers that YAML reads in base 8 or 60. ``where``: line → beginning of the message about it."""
    nodes, seen = [root], set[int]()
    while nodes:
        node = nodes.pop()
        if id(node) in seen:  # an anchor may lead back to its own node
            continue
        seen.add(id(node))
        match node:
            case yaml.MappingNode(value=pairs):
                nodes += [node for pair in pairs for node in pair]
            case yaml.SequenceNode(value=items):
                nodes += items
            # style None: not in quotes, which would make it a text.
            case yaml.ScalarNode(value=text, style=None) if _SURPRISING.fullmatch(text):
                raise ConfigError(
                    f"{where(node.start_mark.line + 1)}: {text} is another number to YAML, one of base 8 or 60; "
                    f'write a decimal number, or "{text}" in quotes for a text'
                )


def _replaces(new: str, old: str, value: Any) -> bool:
    return new == old or (new.startswith(f"{old}.") and value != {}) or old.startswith(f"{new}.")


def _excludes(one: str, one_value: Any, other: str, other_value: Any) -> bool:
    """Tell whether two settings exclude each other in a layer: equal keys, or a value at a key above the other's."""
    below = one.startswith(f"{other}.") and other_value != {}
    above = other.startswith(f"{one}.") and one_value != {}
    return one == other or below or above


def _yaml_problem(error: Exception) -> str:
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return "nested too deeply" if isinstance(error, RecursionError) else _first_line(error)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def with_own_code(layer: Layer) -> Layer:
    """Return a file's layer with the paths of functions in the folder ``code`` beside the file updated to its place.

    Only for functions given as objects: ``/somewhere/code/score.py:score``, with ``score.pkl`` beside it.
    """
    if layer.file is None:
        return layer
    code = layer.file.absolute().parent / "code"

    def found(text: str) -> str:
        path, _, name = text.rpartition(":")
        written = Path(path).is_absolute() and Path(path).parts[-2:] == (code.name, f"{name}.py")
        return f"{code / name}.py:{name}" if written and (code / f"{name}.pkl").is_file() else text

    return replace(layer, values={key: with_texts(value, found) for key, value in layer.values.items()})
