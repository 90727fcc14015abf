"""Arguments are checked against the schema of their tool."""

from enum import Enum
from typing import Any, Literal

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.agents.chat.tool_calls import Misfit, fitted
from headway.agents.interface.tool import make_tool


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
    given = fitted(GOOD | {"i": 2.0, "many": [1.0]}, PARAMETERS)
    assert (given["i"], given["many"]) == (2, [1])
    assert isinstance(given["i"], int)
    assert isinstance(given["many"][0], int)


@pytest.mark.parametrize(
    ("more", "said_so"),
    [
        ({"i": 1.5}, "i is 1.5, expected integer"),
        ({"i": None}, "i is None, expected integer"),
        ({"n": "1"}, "n is '1', expected number"),
        ({"n": False}, "n is False, expected number"),
        ({"s": 1}, "s is 1, expected string"),
        ({"b": 1}, "b is 1, expected boolean"),
        ({"one_of": 2}, "one_of is 2, expected one of 'x', 1"),
        ({"one_of": True}, "one_of is True, expected string or integer"),
        ({"colour": "green"}, "colour is 'green', expected one of 'red', 'blue'"),
        ({"either": 1.5}, "either is 1.5, expected integer or string"),
        ({"many": [1, "2"]}, r"many\[1\] is '2', expected integer"),
        ({"pair": [1]}, "pair has 1 items, expected 2"),
        ({"pair": [1, 2]}, r"pair\[1\] is 2, expected string"),
        ({"named": {"a": "x"}}, "named.a is 'x', expected number"),
        ({"nested": [{"a": ["x"]}]}, r"nested\[0\].a\[0\] is 'x', expected integer"),
        ({"other": 1}, "there is no parameter other; there are: i, n, s, "),
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
    with pytest.raises(Misfit, match=r"only\.n is missing"):
        fitted({"count": 2, "only": {}}, schema)


def test_all_that_is_missing_is_named():
    with pytest.raises(Misfit, match=r"^i, n, s, b, one_of, colour is missing$"):
        fitted({}, PARAMETERS)


@given(
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
    )
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
