"""The suites of `make bench`, one module each, every one with a SUITE."""

from __future__ import annotations

import importlib

from bench.suite import Suite
from runtime.errors import UserError

NAMES = ("speed", "growth", "evaluation", "loss_parity", "recorder", "monitor")


def load_suite(name: str) -> Suite:
    """Import one suite. UserError for an unknown name."""
    if name not in NAMES:
        raise UserError(f"unknown suite {name!r}; fix: make bench SUITE={'|'.join(NAMES)}")
    suite: Suite = importlib.import_module(f"bench.suites.{name}").SUITE
    return suite
