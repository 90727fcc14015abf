"""The tool ``python``: runs the model's code in a fresh interpreter, and returns its output."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable

from headway.errors import SandboxFailed, Unavailable
from headway.runtime.sandbox.sandbox import Sandbox
from headway.runtime.sandbox.sandbox_call import SandboxLimits, SandboxResult

PYTHON = "python"
"""Name of the tool in ``agent.tools``, and for the model."""
MOST_SHOWN = 4000
"""Maximum number of characters that the model sees."""
LAST_LINES = 12
"""Number of lines at the end of a traceback that the model sees."""
NO_FAMILY = os.strerror(errno.EAFNOSUPPORT)
"""Error text of a program that opens a socket of IPv4 or IPv6."""
CELL = "code.py"
"""Name of the code's file, in tracebacks."""
AS_IN_A_SESSION = f"""
import ast, linecache, sys, traceback
text = open({CELL!r}, encoding="utf-8").read()
try:
    tree = ast.parse(text, {CELL!r})
    value = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    names = {{"__name__": "__main__", "__builtins__": __builtins__}}
    exec(compile(tree, {CELL!r}, "exec"), names)
    if value is not None:
        value = eval(compile(ast.Expression(value.value), {CELL!r}, "eval"), names)
        if value is not None:
            print(repr(value))
except SystemExit:
    raise
except BaseException as error:
    sys.stdout.flush()
    traceback.print_exception(error.with_traceback(error.__traceback__.tb_next))
    sys.exit(1)
"""
"""Program that runs the code, and prints the value of its last expression as an interactive session does."""


def python_tool(sandbox: Sandbox, limits: SandboxLimits) -> Callable[[str], Awaitable[str]]:
    """Return the tool's function. The model reads its docstring."""

    async def python(code: str) -> str:
        """Run Python code in a fresh interpreter. Returns what it prints, and the value of its last expression.

        Args:
            code: the code; nothing of earlier calls is there any more
        """
        try:
            ran = await sandbox.run(sandbox.python("-c", AS_IN_A_SESSION), files={CELL: code}, limits=limits)
        except SandboxFailed as cause:
            raise Unavailable(str(cause)) from cause
        return told(ran, limits)

    return python


def told(ran: SandboxResult, limits: SandboxLimits) -> str:
    """Return the model's view of a call: printed text, the end of a traceback, the limit that ended it."""
    parts = [_bounded(ran.stdout.rstrip("\n"))]
    errors = ran.stderr.rstrip("\n").splitlines()
    parts += [_bounded("\n".join((["…"] if len(errors) > LAST_LINES else []) + errors[-LAST_LINES:]))]
    if NO_FAMILY in ran.stderr:
        parts.append("Error: there is no network here: IPv4 and IPv6 are refused, loopback (127.0.0.1, ::1) included")
    if ran.limit is not None:
        parts.append(f"Error: the code was ended, for {limits.said(ran.limit)}")
    elif ran.code and not errors:
        parts.append(f"Error: the code ended with exit code {ran.code}")
    return "\n".join(part for part in parts if part) or "(the code printed nothing)"


def _bounded(text: str) -> str:
    """Return the text, cut in its middle if it is longer than `MOST_SHOWN`."""
    if len(text) <= MOST_SHOWN:
        return text
    head, tail = MOST_SHOWN * 3 // 4, MOST_SHOWN // 4
    return f"{text[:head]}\n… {len(text) - head - tail} characters left out …\n{text[-tail:]}"
