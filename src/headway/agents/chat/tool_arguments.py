"""A tool call's arguments, checked against the tool's schema.

    fitted({"a": 2.0}, {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})   # {"a": 2}

The part of JSON Schema that `transformers.utils.get_json_schema` writes, and nested objects, as servers of tools do;
what else a schema says is not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headway.errors import shown

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class Misfit(ValueError):
    """Arguments that do not fit a schema; the message is for the model."""


def fitted(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Check ``arguments`` against ``schema``, of type object; returns them, with whole floats for integers as integers.

    Parameters that the schema does not name do not fit, unless it allows them.

    Raises:
        Misfit: they do not fit; says which, what was given, and what is expected.
    """
    return _object(arguments, {"additionalProperties": False, **schema}, "")


def _value(value: Any, schema: Any, where: str) -> Any:
    if not isinstance(schema, Mapping) or (value is None and schema.get("nullable")):
        return value
    if isinstance(choices := schema.get("anyOf") or schema.get("oneOf"), Sequence):
        return _any_of(value, choices, where)
    value = _typed(value, schema.get("type"), where)
    if isinstance(values := schema.get("enum"), Sequence) and not any(_same(value, one) for one in values):
        raise Misfit(f"{where} is {shown(value)}, expected one of {', '.join(shown(one) for one in values)}")
    if isinstance(value, list):
        return _items(value, schema, where)
    return _object(value, schema, where) if isinstance(value, dict) else value


def _typed(value: Any, declared: Any, where: str) -> Any:
    names = [declared] if isinstance(declared, str) else list(declared or ())
    if not names or any(name not in _TYPES for name in names):
        return value  # a type that JSON has not: nothing can be said of it
    for name in names:
        if isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool)):
            return value
    if "integer" in names and isinstance(value, float) and value.is_integer():
        return int(value)
    raise Misfit(f"{where} is {shown(value)}, expected {' or '.join(names)}")


def _any_of(value: Any, choices: Sequence[Any], where: str) -> Any:
    said = []
    for choice in choices:
        try:
            return _value(value, choice, where)
        except Misfit as misfit:
            said.append(str(misfit))
    raise Misfit(", or ".join(dict.fromkeys(said)) or f"{where} is {shown(value)}, and nothing is allowed")


def _items(values: list[Any], schema: Mapping[str, Any], where: str) -> list[Any]:
    first = schema.get("prefixItems") or ()
    if first and len(values) != len(first):
        raise Misfit(f"{where} has {len(values)} items, expected {len(first)}")
    schemas = [*first, *[schema.get("items")] * (len(values) - len(first))]
    return [_value(value, one, f"{where}[{i}]") for i, (value, one) in enumerate(zip(values, schemas, strict=True))]


def _object(values: Mapping[str, Any], schema: Mapping[str, Any], where: str) -> dict[str, Any]:
    properties = schema.get("properties") or {}
    inside = f"{where}." if where else ""
    if missing := [name for name in schema.get("required") or () if name not in values]:
        raise Misfit(f"{', '.join(inside + name for name in missing)} is missing")
    other = schema.get("additionalProperties", True)
    if other is False and (extra := [name for name in values if name not in properties]):
        known = ", ".join(properties) or "none"
        raise Misfit(f"there is no parameter {', '.join(inside + name for name in extra)}; there are: {known}")
    return {name: _value(value, properties.get(name, other), inside + name) for name, value in values.items()}


def _same(one: Any, other: Any) -> bool:
    """Tell whether two values are equal as JSON has it: true is not 1."""
    return one == other and isinstance(one, bool) is isinstance(other, bool)
