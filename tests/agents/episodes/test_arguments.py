"""Arguments are checked against the schema of their tool."""

from enum import Enum
from typing import Any, Literal

import jsonschema
import pytest
from hypothesis import strategies as st

from headway.agents.chat.tool_calls import Misfit, fitted
from headway.agents.interface.tool import make_tool
from tests.tiers import searched


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


def every_type(
    i: int,
    n: float,
    s: str,
    b: bool,
    one_of: Literal["x", 1],
    colour: Colour,
    maybe: int | None = None,
    either: int | str = 0,
    many: list[int] | None = None,
    pair: tuple[int, str] = (0, ""),
    named: dict[str, float] | None = None,
    nested: list[dict[str, list[int]]] | None = None,
    anything: Any = None,
) -> None:
    """Take all.

    Args:
        i: i
        n: n
        s: s
        b: b
        one_of: one of
        colour: colour
        maybe: maybe
        either: either
        many: many
        pair: pair
        named: named
        nested: nested
        anything: anything
    """


PARAMETERS = make_tool(every_type, "tests").schema["function"]["parameters"]
LOOSE = PARAMETERS | {"required": [], "additionalProperties": False}
REFERENCE = jsonschema.Draft202012Validator(LOOSE)
GOOD = {"i": 1, "n": 1.5, "s": "s", "b": True, "one_of": "x", "colour": "red"}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 2},
        {"maybe": None},
        {"maybe": 3},
        {"either": "x"},
        {"many": [1, 2]},
        {"pair": [1, "x"]},
        {"named": {"a": 1.5}},
        {"nested": [{"a": [1]}]},
        {"anything": {"a": [None]}},
        {"one_of": 1},
    ],
)
def test_what_fits_is_given_back(more):
    assert fitted(GOOD | more, PARAMETERS) == GOOD | more


def test_whole_floats_are_integers_and_become_them():
    more = {"i": 2.0, "n": 2.0, "many": [1.0], "named": {"a": 1.0}, "nested": [{"a": [1.0]}]}
    given = fitted(GOOD | more, PARAMETERS)
    assert repr({name: given[name] for name in more}) == repr(
        {"i": 2, "n": 2.0, "many": [1], "named": {"a": 1.0}, "nested": [{"a": [1]}]}
    )


@pytest.mark.parametrize(
    ("more", "said_so"),
    [
        ({"i": 1.5}, "i: 1.5 is not of type 'integer'"),
        ({"i": None}, "i: None is not of type 'integer'"),
        ({"n": "1"}, "n: '1' is not of type 'number'"),
        ({"n": False}, "n: False is not of type 'number'"),
        ({"s": 1}, "s: 1 is not of type 'string'"),
        ({"b": 1}, "b: 1 is not of type 'boolean'"),
        ({"one_of": 2}, r"one_of: 2 is not one of \['x', 1\]"),
        ({"one_of": True}, "one_of: True is not "),
        ({"colour": "green"}, r"colour: 'green' is not one of \['red', 'blue'\]"),
        ({"either": 1.5}, "either: 1.5 is not "),
        ({"many": [1, "2"]}, r"many\[1\]: '2' is not of type 'integer'"),
        ({"pair": [1, 2]}, r"pair\[1\]: 2 is not of type 'string'"),
        ({"named": {"a": "x"}}, "named.a: 'x' is not of type 'number'"),
        ({"nested": [{"a": ["x"]}]}, r"nested\[0\].a\[0\]: 'x' is not of type 'integer'"),
        ({"other": 1}, "'other' was unexpected"),
    ],
)
def test_what_does_not_fit_is_named(more, said_so):
    with pytest.raises(Misfit, match=said_so):
        fitted(GOOD | more, PARAMETERS)


def test_whole_floats_beside_a_parameter_that_may_be_null_or_a_definition_become_integers():
    schema = {  # as pydantic writes Filter | None
        "type": "object",
        "$defs": {"Filter": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
        "properties": {"count": {"type": "integer"}, "only": {"anyOf": [{"$ref": "#/$defs/Filter"}, {"type": "null"}]}},
    }
    assert repr(fitted({"count": 2.0, "only": {"n": 1}}, schema)) == repr({"count": 2, "only": {"n": 1}})
    with pytest.raises(Misfit, match=r"^only"):
        fitted({"count": 2, "only": {}}, schema)


@searched(
    100,
    st.fixed_dictionaries(
        {},
        optional={
            name: st.recursive(
                st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.5, 1.0]) | st.sampled_from("xs"),
                lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
                max_leaves=3,
            )
            for name in ("i", "n", "s", "one_of", "either", "many", "named", "nested")
        },
    ),
)
def test_it_is_as_strict_as_json_schema(arguments):
    properties = PARAMETERS["properties"]
    given = {  # nullable is no word of JSON Schema
        name: value for name, value in arguments.items() if not (value is None and properties[name].get("nullable"))
    }
    try:
        fitted(arguments, LOOSE)
        fits = True
    except Misfit:
        fits = False
    assert fits is REFERENCE.is_valid(given)
