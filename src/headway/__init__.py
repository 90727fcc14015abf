"""Headway: asynchronous reinforcement learning of language models."""

from importlib import import_module
from typing import TYPE_CHECKING

from headway.runtime.moved_modules import install

if TYPE_CHECKING:
    from headway.api import Evaluation, Run, evaluate, load, plan, train
    from headway.errors import HeadwayError, RunError, UserError

__all__ = ["Evaluation", "HeadwayError", "Run", "RunError", "UserError", "evaluate", "load", "plan", "train"]
__version__ = "0.1.0"

install()

if not TYPE_CHECKING:  # a type checker is to find misspelled names

    def __getattr__(name: str) -> object:
        """Import the interface when something of it is asked for, so that ``import headway`` costs nothing."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # Not a statement: the layers below would seem to import the interface with `headway` itself.
        where = import_module("headway.errors" if name.endswith("Error") else "headway.api")
        found = globals()[name] = getattr(where, name)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
