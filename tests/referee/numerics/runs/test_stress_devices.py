"""The stress of devices names the device with the fault, and no other one."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from referee.numerics.runs import stress_devices
from referee.numerics.runs.stress_command import stress_devices as run_command
from referee.numerics.runs.stress_devices import (
    Flip,
    Stressed,
    StressedDevice,
    computations,
    majority,
    odd_machines,
)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(stress_devices, "BATCH", 4)


def test_the_device_that_flips_a_bit_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(0.005, tmp_path, ["cpu"] * 2, "1:0.2:21") == 1
    printed = capsys.readouterr().out
    assert "1 of 2 devices deviate: cpu process 1" in printed
    assert not {"cpu process 0", "no majority"} & {*re.split(r"  +|\n", printed)}
    (file,) = tmp_path.glob("stress-*.json")
    assert set(json.loads(file.read_text())["golden"]) == {*computations("cpu", 2)}


def test_a_flip_deviates_and_devices_that_disagree_have_no_majority() -> None:
    good, bad = StressedDevice("cpu", 0, 1, None), StressedDevice("cpu", 0, 1, Flip(0, 0.5, 21))
    golden = good.batch("matrix product")
    assert len(set(golden)) == 1
    assert bad.batch("matrix product") != golden
    bad.fault = None
    assert bad.batch("matrix product") == golden
    outcome = Stressed(["a", "b"])
    outcome.count("copy", {"a": [1, 1], "b": [2, 2]})
    assert {row.target for row in outcome.rows()} == {"no majority"}


@given(st.lists(st.integers(0, 3)))
def test_a_majority_is_more_than_half(values: Sequence[int]) -> None:
    found = majority(values)
    counts = {value: values.count(value) for value in values}
    assert (found is not None) == any(2 * count > len(values) for count in counts.values())
    assert found is None or 2 * counts[found] > len(values)


def test_a_machine_whose_golden_results_are_others_is_named_among_machines_of_its_kind() -> None:
    good, bad = {"kind": "A", "golden": {"copy": 1, "sum": 2}}, {"kind": "A", "golden": {"copy": 1, "sum": 3}}
    other = {"kind": "B", "golden": {"copy": 9, "sum": 9}}
    assert odd_machines({"a": good, "b": good, "c": bad, "d": other}) == ["c"]
    assert odd_machines({"a": good, "c": bad}) == []
