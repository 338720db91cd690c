"""Errors for the user, and the one place that prints them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

from gpt2.system.resource_errors import disk_full, explain_full_disk
from gpt2.system.stdout import LastingOutput, printable

INTERRUPTED = 130


class UserError(Exception):
    """One line: the fact with its value, the consequence, and the fix."""


def one_line(error: BaseException) -> str:
    """Return the error's text in one line, or its type where it has no text."""
    return " ".join(str(error).split()) or type(error).__name__


def run_command(main: Callable[[], int | None]) -> None:
    """Run a command's `main` and exit with its status. A UserError becomes one line on stderr and status 1.

    Ctrl-C becomes one line and status INTERRUPTED, as in a shell.
    Everything that the command prints is escaped. It continues when the reader of its output ends, as in
    `make memory | head`.
    """
    out, err = LastingOutput(sys.stdout), LastingOutput(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):  # type: ignore[type-var]
        try:
            status = main()
        except UserError as error:
            print(f"error: {printable(str(error))}", file=sys.stderr)
            status = 1
        except OSError as error:
            number = disk_full(error)
            if not number:
                raise
            fact, fix = explain_full_disk(number, Path(error.filename or "."))
            print(f"error: {printable(fact)}; fix: {fix}", file=sys.stderr)
            status = 1
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            status = INTERRUPTED
        finally:
            sys.stdout.flush()  # the last lines too may meet a closed pipe
    sys.exit(status or 0)
