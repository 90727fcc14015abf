"""Table of named functions that a user can extend, with a decorator or a file. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Generic, TypeVar

from headway.errors import ConfigError, HeadwayError, UserCodeError, raised_by
from headway.runtime.user_code import did_you_mean, load_function, names_user_code

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[F]):
    """Table of functions of one kind by name.

    ``what``, ``key`` and ``also`` are for messages: the kind of function, the configuration key that selects one, and
    the key's other values.

    Example:
        >>> rules = Registry("rule", "game.rule")
        >>> @rules.register("double")
        ... def double(number):
        ...     return 2 * number
        >>> rules.names(), rules.get("double")(4)
        (['double'], 8)
    """

    def __init__(
        self,
        what: str,
        key: str,
        also: str = "file.py:function for your own",
        *,
        expected: str = "",
        fits: Callable[..., bool] = lambda result, *arguments: True,
    ) -> None:
        """Set up. ``expected``: words for the result of a user's function. ``fits``: function that checks a result,
        given the arguments.
        """
        self._what, self._expected, self._fits = what, expected, fits
        self._key = key
        self._also = also
        self._functions: dict[str, F] = {}

    def register(self, name: str) -> Callable[[F], F]:
        """Decorator: enter the function under ``name``. Raises `ConfigError` where the name is taken."""

        def enter(function: F) -> F:
            if name in self._functions:
                raise ConfigError(f"there is already a {self._what} named {name!r}; choose another name")
            self._functions[name] = function
            return function

        return enter

    def names(self) -> list[str]:
        return sorted(self._functions)

    def get(self, name: str) -> F:
        """Return the function registered as ``name``, or load ``file.py:function``.

        Raises:
            ConfigError: nothing has that name; the message lists the names.
            UserCodeError: the user's file does not import or lacks the function.
        """
        if names_user_code(name):
            return self._attributed(name, load_function(name))  # type: ignore[return-value]  # the user's promise
        if name not in self._functions:
            hint = did_you_mean(name, self._functions)
            raise ConfigError(
                f"{self._key}: unknown {self._what} {name!r}{hint}; known: {', '.join(self.names())}, or {self._also}"
            )
        return self._functions[name]

    def _attributed(self, spec: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the user's ``function``: its exceptions, and results of a wrong form, become `UserCodeError`."""
        expected = f"; expected {self._expected}" if self._expected else ""

        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            try:
                result = function(*arguments, **named)
            except HeadwayError:
                raise
            except (Exception, SystemExit) as cause:  # sys.exit() would silently end the calling process
                raise UserCodeError(f"{spec}: raised {raised_by(cause)}{expected}") from cause
            if not self._fits(result, *arguments):
                raise UserCodeError(f"{spec}: returned {shown_result(result)}{expected}")
            return result

        return call


def shown_result(result: Any) -> str:
    """Describe a result by its types and shapes: ``(Tensor [4, 7], dict)``."""
    if isinstance(result, tuple):
        return f"({', '.join(map(shown_result, result))})"
    shape = getattr(result, "shape", None)
    return type(result).__name__ if shape is None else f"{type(result).__name__} {list(shape)}"
