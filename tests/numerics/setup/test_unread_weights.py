"""Weights and inputs without a digest are not called equal; every kind that can be read is compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from numerics import ConfigChecker
from numerics.setup.checklist_rows import EQUAL, FATAL, NO_DIGEST, NOT_RECORDED, ChecklistRow
from numerics.setup.compared_checklists import compare_checklists
from numerics.setup.described_model import tensor_digest

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's prototypes
X = torch.arange(1.0, 13.0).view(3, 4)
KINDS = {
    "sparse": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor([x[:1], x[1:]]),
    "jagged": lambda x: torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.25, 0, torch.quint8),
}


class Holder(nn.Module):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("table", value)


def compared(tmp_path: Path, *values: Tensor) -> list[ChecklistRow]:
    paths = [tmp_path / f"{place}.zip" for place in range(2)]
    for path, value in zip(paths, values, strict=True):
        torch.manual_seed(0)
        ConfigChecker(Holder(value), output_zip_path=path)
    return [check for check in compare_checklists(*paths).checks if check.group == "weights"]


@pytest.mark.parametrize("kind", KINDS)
def test_another_value_is_found_in_every_kind(kind: str, tmp_path: Path) -> None:
    changed = X.clone()
    changed[2, 1] += 1
    assert [check.status for check in compared(tmp_path, KINDS[kind](X), KINDS[kind](X.clone()))] == [EQUAL]
    assert [check.status for check in compared(tmp_path, KINDS[kind](X), KINDS[kind](changed))] == [FATAL]


def test_unread_weights_are_named_and_the_others_are_equal(tmp_path: Path) -> None:
    meta = torch.ones(3, device="meta")
    assert tensor_digest(meta).startswith(NO_DIGEST)
    checks = compared(tmp_path, meta, meta)
    assert [check.status for check in checks] == [NOT_RECORDED, EQUAL]
    assert checks[1].values == ("2 tensors", "2 tensors")
    assert checks[0].values == ("1 tensors without a digest", "1 tensors without a digest")
    assert "agreement cannot be shown" in checks[0].reason
    assert "table" in checks[0].reason
