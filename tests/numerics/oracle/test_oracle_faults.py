"""Faults that two runs of one faulty device do not show: the check against float64 names the operation alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.numerics.corpus.corpus import pinned
from tests.numerics.corpus.faults import CHECKSUMS, VALUES
from tests.numerics.corpus.oracle_faults import ORACLE_FAULTS, OracleFault, answer


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


# The other mode of each: `make bench SUITE=numerics`.
@pytest.mark.parametrize(
    ("fault", "mode"),
    [(fault, VALUES if place == 1 else CHECKSUMS) for place, fault in enumerate(ORACLE_FAULTS)],
    ids=lambda part: part.name if isinstance(part, OracleFault) else part,
)
def test_the_operation_is_named(fault: OracleFault, mode: str, tmp_path: Path) -> None:
    found = answer(tmp_path, fault, mode)
    assert found.right, found.found
    assert found.line in pinned()
