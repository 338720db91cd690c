"""Faults that a comparison of two runs does not name: repetition or stress names cause and place, and no clean step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.numerics.corpus.repeat_faults import REPEAT_FAULTS, RepeatFault, answer, calm_memory, repeat


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("fault", REPEAT_FAULTS, ids=lambda fault: fault.name)
def test_the_cause_is_named(fault: RepeatFault, tmp_path: Path) -> None:
    found = answer(tmp_path, fault)
    assert found.right, found.found


def test_without_a_fault_nothing_is_named() -> None:
    found = repeat(None, calm_memory())
    assert found.conclusion.findings == [], found.text()
    assert found.conclusion.notes == []
