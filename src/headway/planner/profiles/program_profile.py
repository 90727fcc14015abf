"""The part of a profile that describes programs: what an episode of several turns does between its turns."""

from __future__ import annotations

from pydantic import Field

from headway.config.sections.section import Positive, Section
from headway.planner.profiles.distributions import ConstantNumber, NumberProfile


class ProgramProfile(Section):
    """Episodes of several turns, each followed by a step of the environment.

    The profile's ``response`` has the tokens of one turn.
    """

    turns: NumberProfile
    """Number of turns of an episode, rounded, at least 1."""
    step_s: NumberProfile = ConstantNumber(kind="constant", value=0.0)
    """Seconds of the step after a turn, in which the episode holds no slot of a replica."""
    step_tokens: NumberProfile = ConstantNumber(kind="constant", value=0.0)
    """Number of tokens that a step adds to the context, rounded."""
    forks: float = Field(0.0, ge=0, le=1)
    """Share of further turns whose context begins again at the prompt, and so makes a row of its own."""
    environments: Positive | None = None
    """Most episodes that are open at once, on all machines together: ``rollout.environment_processes``. Further ones
    wait before their first turn. Default: no limit, as for asynchronous programs."""
