"""Two records with tensors of which nothing is known are equal in what could be compared, and no further."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from referee.numerics import Recorder, RecorderConfig
from referee.numerics.compare.compare_records import Comparison, compare_records
from referee.numerics.compare.comparison_page import summary, write_tables

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's prototypes


class Adds(nn.Module):
    """Return a tensor of a kind beside an ordinary result."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.value = value

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.value


def compared(tmp_path: Path, *values: Tensor, **options: str) -> Comparison:
    folders = []
    for place, value in enumerate(values):
        torch.manual_seed(0)
        folders.append(tmp_path / f"{place}")
        recorder = Recorder(RecorderConfig(dump_path=str(folders[-1]), **options))
        model = Adds(value)
        recorder.start(model)
        model(torch.ones(3, 2))
        recorder.stop()
        recorder.step()
    return compare_records(*folders)


@pytest.mark.parametrize("mode", ["statistics", "md5"])
def test_unequal_nested_tensors_are_found(mode: str, tmp_path: Path) -> None:
    one, other = (torch.nested.nested_tensor([torch.ones(2), torch.full((3,), end)]) for end in (1.0, 2.0))
    assert compared(tmp_path / "a", one, other, summary_mode=mode).verdict == "diverges"
    found = compared(tmp_path / "b", one, one.clone(), summary_mode=mode)
    assert found.verdict_text == "equal"


def test_tensors_without_statistics_are_counted_and_named(tmp_path: Path) -> None:
    """float4 has no statistics in torch, so that two of them cannot be compared without a checksum."""
    one, other = (torch.full((4,), byte, dtype=torch.uint8).view(torch.float4_e2m1fn_x2) for byte in (1, 2))
    found = compared(tmp_path / "a", one, other)
    assert found.verdict_text == "equal, incomplete"
    assert found.uncompared != []
    assert any("Module.Adds" in line for line in summary(found) if line.startswith("incomplete: "))
    write_tables(found, tmp_path / "o")
    assert json.loads((tmp_path / "o/compare.json").read_text())["incomplete"] == found.incomplete
    by_checksum = compared(tmp_path / "b", one, other, summary_mode="md5")
    assert by_checksum.verdict != "equal"
    assert by_checksum.incomplete == []
