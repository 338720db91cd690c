"""Dumps that msProbe 26.2.0 wrote, compared with each other and with records of ours of the same step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from referee.numerics.compare.compare_records import compare_records
from referee.numerics.record.record_settings import RecorderConfig
from referee.numerics.record.recorder import Recorder

DUMPS = Path(__file__).parents[3] / "fixtures/msprobe-26.2"
KINDS = ("none", "tanh")


class Residual(nn.Module):
    """The module that was dumped by msProbe."""

    def __init__(self, approximate: str) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 16)
        self.act, self.down = nn.GELU(approximate=approximate), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return result


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Records of ours and dumps of msProbe: "ours none", "msprobe tanh", ..."""
    found = {f"msprobe {kind}": DUMPS / kind for kind in KINDS}
    for kind in KINDS:
        found[f"ours {kind}"] = tmp_path_factory.mktemp(kind)
        torch.manual_seed(0)
        model = Residual(kind)
        x = torch.randn(4, 8)
        recorder = Recorder(RecorderConfig(dump_path=str(found[f"ours {kind}"]), level="mix"))
        recorder.start(model)
        model(x).square().mean().backward()
        recorder.stop()
        recorder.step()
    return found


@pytest.mark.parametrize("target", ["msprobe", "ours"])
@pytest.mark.parametrize("golden", ["msprobe", "ours"])
def test_the_same_step_agrees_and_the_other_gelu_is_named(
    records: dict[str, Path], target: str, golden: str
) -> None:
    for kind in KINDS:
        assert compare_records(records[f"{target} {kind}"], records[f"{golden} {kind}"]).verdict != "diverges"
    found = compare_records(records[f"{target} tanh"], records[f"{golden} none"]).first
    assert found
    assert found.call == "Module.act.GELU.forward.0 > Functional.gelu.0.forward"


def test_a_record_has_the_names_the_order_and_the_parents_of_msprobe(records: dict[str, Path]) -> None:
    """Its rows match by name in msProbe's compare, and its calls have the same ancestors in msProbe's graph."""
    theirs, ours = (read(records[f"{side} none"]) for side in ("msprobe", "ours"))
    assert set(theirs["dump"]["data"]) <= set(ours["dump"]["data"])
    forwards = [name for name in theirs["dump"]["data"] if "forward" in name]
    assert [name for name in ours["dump"]["data"] if name in forwards] == forwards
    assert list(ours["dump"])[:3] == list(theirs["dump"])[:3]
    shared = [name for name in theirs["construct"] if name in ours["construct"]]
    assert {name for name in theirs["dump"]["data"] if "parameters_grad" not in name} <= set(shared)
    for name in shared:
        if theirs["construct"][name] is not None:  # msProbe's is None where it lost the module in backward
            assert ours["construct"][name] == theirs["construct"][name], name
    for name, row in theirs["dump"]["data"].items():
        assert {key for key, value in row.items() if any(value)} <= set(ours["dump"]["data"][name]), name


def read(folder: Path) -> dict[str, Any]:
    rank = next(folder.glob("step0/*"))
    return {name: json.loads((rank / f"{name}.json").read_text()) for name in ("dump", "construct", "stack")}
