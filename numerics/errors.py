"""The error of bad input: one line with the fact and the fix."""

from __future__ import annotations


class NumericsError(Exception):
    """A configuration or a record cannot be used."""


def described(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]
