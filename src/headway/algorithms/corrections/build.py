"""Building a correction from its name and parameters, checked before anything runs."""

from __future__ import annotations

from typing import get_args

from headway.algorithms.corrections.base import CORRECTIONS, Correction, CorrectionParams
from headway.algorithms.corrections.ratio import Action, from_params
from headway.algorithms.corrections.sequence_mask import check_delta
from headway.errors import ConfigError

SEQUENCE_MASK = "off_policy_sequence_mask"


def build_correction(name: str, params: CorrectionParams) -> Correction:
    """Build the correction ``name``: a registered one or ``file.py:function``, after a check of its parameters.

    A function of the user's own gets all parameters, unchecked.

    Raises:
        ConfigError: unknown name; parameters that make no sense, or that the named correction does not look at.
        UserCodeError: the user's file does not import or lacks the function.
    """
    correction = CORRECTIONS.get(name)
    if name in get_args(Action):
        if params.delta is not None:
            raise ConfigError(f"correction {name}: delta has no effect, it belongs to {SEQUENCE_MASK}")
        from_params(name, params)  # type: ignore[arg-type]  # one of Action's names
    elif name == SEQUENCE_MASK:
        check_delta(params.delta)
        unused = [field for field in ("bound", "lower", "veto") if getattr(params, field) is not None]
        unused += ["level"] if params.level != "token" else []
        if unused:
            raise ConfigError(f"correction {name}: {', '.join(unused)} has no effect, it is bounded by delta alone")
    return correction
