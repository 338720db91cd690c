"""Faults that only a search over fixes or settings can name."""

import pytest

from tests.numerics.corpus.bisect_faults import BISECT_FAULTS, BisectFault, answer
from tests.numerics.corpus.corpus import pinned


@pytest.mark.parametrize("fault", BISECT_FAULTS, ids=lambda fault: fault.name)
def test_the_smallest_set_is_the_fault(fault: BisectFault) -> None:
    found = answer(fault)
    assert found.right, found.found
    assert found.line in pinned()
