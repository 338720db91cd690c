"""The checklist of two machines (sections 2.1 and 4.8): pack each machine into a zip, compare two zips."""

from numerics.checklist.pack import ConfigChecker
from numerics.checklist.report import compare_zips, write_comparison

__all__ = ["ConfigChecker", "compare_zips", "write_comparison"]
