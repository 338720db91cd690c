"""Fixtures of the bench tests."""

from collections.abc import Iterator

import pytest

from bench.case_step import prepare_case


@pytest.fixture(autouse=True)
def _no_prepared_case() -> Iterator[None]:
    """Forget the cases that a test prepared in this process."""
    yield
    prepare_case.cache_clear()
