"""The error of bad input: one line with the fact and the fix."""

from __future__ import annotations


class NumericsError(Exception):
    """A configuration or a record cannot be used."""
