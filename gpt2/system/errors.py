"""Errors that are meant for the user's eyes, and the one place that prints them."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class UserError(Exception):
    """One line that says what is wrong, the value seen and what would be right."""


def run_command(main: Callable[[], int | None]) -> None:
    """Run a command's `main` and exit with its status; a UserError becomes one line on stderr and status 1."""
    try:
        status = main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        print(
            f"error: {error.filename or 'the disk'}: {error.strerror}; free some space, or write elsewhere",
            file=sys.stderr,
        )
        status = 1
    sys.exit(status or 0)
