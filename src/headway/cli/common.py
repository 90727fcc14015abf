"""What the commands share: options, and errors that end as one message."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from headway.errors import HeadwayError

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@contextmanager
def errors_as_messages(debug: bool) -> Iterator[None]:
    """End the command with one message on stderr and the error's exit code, without a traceback unless ``debug``."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except typer.Exit:
        raise
    except Exception as error:
        if debug:
            traceback.print_exc()
        expected = isinstance(error, HeadwayError)
        typer.echo(f"error: {error}" if expected else f"error: unexpected {type(error).__name__}: {error}", err=True)
        if not expected and not debug:
            typer.echo("This should not happen. Run again with --debug to see where it did.", err=True)
        for note in getattr(error, "__notes__", ()):
            typer.echo(note, err=True)
        raise typer.Exit(error.exit_code if isinstance(error, HeadwayError) else EXIT_FAILED) from error
