"""Errors for the user, and the one place that prints them."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class UserError(Exception):
    """One line: the fact with its value, the consequence, and the fix."""


def one_line(error: BaseException) -> str:
    """Return the error's text in one line, or its type where it has no text."""
    return " ".join(str(error).split()) or type(error).__name__


def run_command(main: Callable[[], int | None]) -> None:
    """Run a command's `main` and exit with its status. A UserError becomes one line on stderr and status 1."""
    try:
        status = main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        print(
            f"error: {error.filename or 'the disk'}: {error.strerror}; fix: free some space, or write elsewhere",
            file=sys.stderr,
        )
        status = 1
    sys.exit(status or 0)
