"""The suite of the monitor."""

from bench.suites.monitor.measure import SUITE

__all__ = ["SUITE"]
