"""Base class of all sections of the configuration, and types of values that several keys share."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Probability = Annotated[float, Field(gt=0, le=1)]


def exact_fraction(value: Any) -> Any:
    """Return an exact fraction: 0.3, "0.3" and "3/10" all become 3/10. A float counts by its shortest decimal form."""
    try:
        # By decimal form: Fraction(0.3) is a little less than 3/10, and ⌊η·B⌋ could be one group too few.
        return Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        raise ValueError("expected a number, like 1, 0.3 or 3/10") from None


def folder_path(value: Any) -> Any:
    """Turn text into a path, ``~`` expanded. Raises `ValueError` for empty text, which would mean ``.``."""
    if not isinstance(value, str | Path) or not str(value).strip() or "\0" in str(value):
        raise ValueError("expected the path of a directory, as text")
    return Path(value).expanduser()


def types_in(annotation: Any) -> set[Any]:
    """Return the plain types in an annotation: for ``Positive | None``, int and None's type."""
    inner = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
    return set().union(*map(types_in, inner)) if inner else {annotation}


def text_or_list(value: Any) -> str:
    """Return which of two forms a value has, by its type, so that errors are reported for only that form."""
    return "list" if isinstance(value, list | tuple) else "text"


def on_or_off(value: Any) -> Any:
    """Return ``on`` or ``off`` for a boolean: YAML reads these words as booleans without quotes."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def never_or_every(value: int) -> int:
    if value == 0:
        raise ValueError("expected a number of versions, or -1")
    return value


def shortest_spelling(value: Fraction) -> int | float | str:
    """Return the number as a user would type it: an integer or decimal if that is exact, else ``p/q``."""
    if value.denominator == 1:
        return int(value)
    return float(value) if Fraction(str(float(value))) == value else str(value)


EXACT_NUMBER = "exact"
"""Key that marks an exact fraction in the JSON schema; its bounds are numbers and its default is text."""


def exact_number(**bounds: float) -> WithJsonSchema:
    """Return the JSON schema of a fraction within ``minimum``, ``maximum`` and so on."""
    return WithJsonSchema({EXACT_NUMBER: True, **bounds})


Exact = Annotated[Fraction, BeforeValidator(exact_fraction), PlainSerializer(shortest_spelling)]
Eta = Annotated[Exact, Field(ge=0), exact_number(minimum=0)]
Share = Annotated[Exact, Field(ge=0, le=1), exact_number(minimum=0, maximum=1)]
Weight = Annotated[Exact, Field(gt=0), exact_number(exclusiveMinimum=0)]
Folder = Annotated[Path, BeforeValidator(folder_path)]
Every = Annotated[
    int,
    Field(ge=-1),
    AfterValidator(never_or_every),
    WithJsonSchema({"type": "integer", "minimum": -1, "not": {"const": 0}}),
]
"""A number of versions between two events, or -1."""


class Section(BaseModel):
    """A part of the configuration. Unknown keys are errors; values are checked where they are built."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,  # all configurations share a field's default section
        use_attribute_docstrings=True,
        validate_default=True,
        coerce_numbers_to_str=True,  # YAML reads a name like 7 as a number
        allow_inf_nan=False,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _keys_that_are_not_given_are_the_defaults(cls, value: Any, info: ValidationInfo) -> Any:
        """Complete a section with the values in which this field's default differs from its class
        (``critic.optim.lr``).
        """
        field = cls.model_fields[info.field_name or ""]
        if (
            isinstance(value, Mapping)
            and isinstance(field.default, Section)
            and field.annotation is type(field.default)
        ):
            # Only where the default differs from its class: critic.optim={} keeps the critic's lr.
            # With pydantic alone, a critic.optim with one given key had the lr of actor.optim.
            return {**field.default.model_dump(exclude_defaults=True), **value}
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _a_truth_value_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic reads true as 1: rollout.n=true would be one answer per prompt.
        if isinstance(value, bool) and {int, float} & types_in(cls.model_fields[info.field_name or ""].annotation):
            raise ValueError("expected a number")
        return value
