"""The errors of bad input."""

from __future__ import annotations


class UserError(Exception):
    """One line: the fact with its value, the consequence, and the fix."""


class NumericsError(UserError):
    """A configuration or a record cannot be used."""


def described(error: BaseException) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]
