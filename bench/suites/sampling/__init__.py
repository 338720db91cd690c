"""The suite of sampling."""

from bench.suites.sampling.measure import SUITE

__all__ = ["SUITE"]
