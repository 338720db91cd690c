"""Records that are not complete, or that were made with other settings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from referee.numerics.compare.compare_records import compare_records
from tests.referee.numerics.compare.small_models import STATISTICS, TENSORS, record

MODES: list[dict[str, Any]] = [{"level": "L0"}, TENSORS]


def run(model: nn.Module) -> None:
    x = torch.linspace(-1, 2, 96).sin().view(2, 6, 8)
    torch.autograd.backward(model(x).float().square().mean())


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Tanh(), nn.Linear(8, 8))


def damaged(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Copy a record and change its dump.json."""
    other = folder.parent / "damaged"
    shutil.copytree(folder, other)
    file = next(other.rglob("dump.json"))
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return other


def first_rows(content: dict[str, Any]) -> None:
    content["data"] = dict(list(content["data"].items())[:4])


def no_backward(content: dict[str, Any]) -> None:
    content["data"] = {name: row for name, row in content["data"].items() if "backward" not in name}


def no_forward_of_one(content: dict[str, Any]) -> None:
    content["data"] = {
        name: row for name, row in content["data"].items() if not name.startswith("Module.2.Tanh")
    }


@pytest.mark.parametrize(("mode", "swapped"), [(MODES[0], False), (MODES[1], True)])
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("change", [first_rows, no_backward, no_forward_of_one])
def test_a_truncated_record_is_not_equal(
    change: Any, swapped: bool, counted: bool, mode: dict[str, Any], tmp_path: Path
) -> None:
    whole = record(tmp_path, layers(), run, **mode)

    def damage(content: dict[str, Any]) -> None:
        change(content)
        if not counted:
            del content["rows"]  # as in a record of msProbe

    part = damaged(whole, damage)
    found = compare_records(whole, part) if swapped else compare_records(part, whole)
    if counted or change is not no_forward_of_one:
        assert found.first
        assert found.first.evidence == "one side"
    assert any("not complete" in text for text in found.incomplete) == counted


def test_what_the_settings_leave_out_is_a_note(tmp_path: Path) -> None:
    for settings in (
        {"level": "L0"},
        {"level": "mix", "data_mode": ("forward",)},
        {"level": "mix", "list": ("Tanh",)},
    ):
        torch.manual_seed(0)
        part = record(tmp_path, layers(), run, **settings)
        torch.manual_seed(0)
        whole = record(tmp_path, layers(), run, level="mix")
        for found in (compare_records(part, whole), compare_records(whole, part)):
            assert found.verdict == "equal", found.first
            assert any("other settings" in note for note in found.notes)


def test_memory_that_a_function_overwrites_is_no_difference(tmp_path: Path) -> None:
    """As in pack_padded_sequence, scatter_ fills new memory; its first argument is what the memory held before."""
    places = torch.arange(6)

    def scatter(model: nn.Module) -> None:
        order = torch.empty(6, dtype=torch.int64).scatter_(0, places, places)
        torch.autograd.backward(model(torch.ones(6, 8)[order]).sum())

    def held(content: dict[str, Any]) -> None:
        content["data"]["Tensor.scatter_.0.forward"]["input_args"][0] |= {"Max": 7.0, "md5": "7"}

    whole = record(tmp_path, layers(), scatter, **STATISTICS)
    assert compare_records(damaged(whole, held), whole).verdict == "equal"
