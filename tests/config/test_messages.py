from typing import Annotated, Any, Literal

import pytest
from pydantic import Discriminator, Field, Tag, ValidationError

from headway.config.schema_keys import known_keys
from headway.config.schema_messages import explain
from headway.config.sections.section import Positive, Section


class Apple(Section):
    kind: Literal["apple"]
    seeds: Positive = 5


class Pear(Section):
    kind: Literal["pear"]
    length: Annotated[int, Field(ge=0, alias="long")] = 0


class Tree(Section):
    age: Positive = 1


def kind_of(value: Any) -> Any:
    return value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)


class Orchard(Section):
    fruit: Annotated[Annotated[Apple, Tag("apple")] | Annotated[Pear, Tag("pear")], Discriminator(kind_of)] = Apple(
        kind="apple"
    )
    trees: list[Tree] = Field([], max_length=2)


def explained(values: dict[str, Any], origins: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ValidationError) as refused:
        Orchard.model_validate(values)
    return explain(refused.value, origins or {}, root=Orchard).splitlines()


def test_keys_of_another_root_are_known_under_the_name_that_is_written() -> None:
    assert list(dict.fromkeys(known_keys(Orchard))) == ["fruit.kind", "fruit.seeds", "fruit.long", "trees.age"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"fruit": {"kind": "apple", "seeds": 0}}, "fruit.seeds: got 0, expected a number greater than 0"),
        ({"fruit": {"kind": "pear", "long": -1}}, "fruit.long: got -1, expected a number greater than or equal to 0"),
        ({"fruit": {"kind": "pear", "lon": 1}}, "fruit.lon: unknown key; did you mean fruit.long?"),
        ({"fruit": {"seeds": 1}}, "fruit.kind: got nothing, expected 'apple' or 'pear'"),
        ({"fruit": {"kind": "plum"}}, "fruit.kind: got 'plum', expected 'apple' or 'pear'"),
        ({"fruit": ["apple"]}, "fruit: got ['apple'], expected a section with keys of its own"),
        ({"trees": [{"age": 1}, {"age": 0}]}, "trees[1].age: got 0, expected a number greater than 0"),
        ({"trees": [{"ages": 1}]}, "trees[0].ages: unknown key; did you mean trees.age?"),
        ({"trees": {"age": 1}}, "trees: got {'age': 1}, expected a list of values in brackets"),
        ({"trees": [{}] * 3}, "trees: got [{}, {}, {}], expected at most 2 values"),
        ({"fruits": {"seeds": 1}}, "fruits: unknown key"),
    ],
)
def test_alternatives_of_a_union_and_places_in_a_list_are_found(values: dict[str, Any], message: str) -> None:
    assert explained(values) == [message]


def test_the_place_is_named_where_it_is_known() -> None:
    values = {"fruit": {"kind": "plum"}, "trees": [{"age": 0}]}
    assert explained(values, {"fruit.kind": "in a.yaml", "trees": ""}) == [
        "fruit.kind: got 'plum' (in a.yaml), expected 'apple' or 'pear'",
        "trees[0].age: got 0, expected a number greater than 0",
    ]
