"""A record of a fixed model has the calls of the model without fixes, and no conversions."""

import json
from pathlib import Path
from typing import Any

import pytest

from referee.numerics import Recorder, RecorderConfig, fix
from tests.referee.numerics.search.small_models import model_of, step


def recorded(folder: Path, words: str, level: str) -> dict[str, Any]:
    model = model_of()
    recorder = Recorder(RecorderConfig(dump_path=str(folder), level=level))
    with fix(model, words):
        recorder.start(model)
        step(model)
        recorder.stop()
        recorder.step()
    data: dict[str, Any] = json.loads((folder / "step0/rank0/dump.json").read_text())["data"]
    return data


@pytest.mark.parametrize("words", ["upcast:blocks.0.mlp", "small:blocks.1.attention"])
def test_a_record_of_a_fixed_model_has_each_call_once(tmp_path: Path, words: str) -> None:
    plain, fixed = (recorded(tmp_path / name, given, "L0") for name, given in (("a", ""), ("b", words)))
    assert fixed.keys() == plain.keys()
    for name, row in plain.items():
        for found, exact in zip(numbers(fixed[name]), numbers(row), strict=True):
            assert found == pytest.approx(exact, rel=1e-4, abs=1e-4)
    plain, fixed = (recorded(tmp_path / name, given, "L1") for name, given in (("c", ""), ("d", words)))
    assert [name for name in plain if "linear" in name] == [name for name in fixed if "linear" in name]


def numbers(value: Any) -> list[float]:
    """Return the norms of a row, in order."""
    if isinstance(value, dict):
        mine = [float(value["Norm"])] if value.get("Norm") is not None else []
        return mine + [one for inner in value.values() for one in numbers(inner)]
    return [one for inner in value for one in numbers(inner)] if isinstance(value, list) else []
