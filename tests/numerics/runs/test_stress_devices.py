"""The stress of devices names the device with the fault, and no other one."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2.system.errors import UserError
from numerics.errors import NumericsError
from numerics.runs import stress_devices
from numerics.runs.stress_command import stress_devices as run_command
from numerics.runs.stress_devices import Flip, computations, majority, odd_machines, parse_fault, stress
from scripts import stress as make_stress

THREE = ("cpu", "cpu", "cpu")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(stress_devices, "BATCH_SECONDS", 0.02)


def test_the_device_that_flips_a_bit_is_named_with_the_bit() -> None:
    outcome = stress(THREE, 0.03, Flip(1, 0.2, 21))
    assert outcome.faulty == ["cpu process 1"]
    assert set(outcome.golden) == {*computations("cpu", 3)}
    assert None not in outcome.golden.values()
    rows = outcome.rows()
    assert {row.side for row in rows} == {"cpu process 1"}
    places = [row.place for row in rows if row.place]
    assert places
    assert all("1 of " in place and "bits [21]" in place for place in places)


def test_sound_devices_do_not_deviate_alone_or_together() -> None:
    for devices in (THREE[:1], THREE[:2]):
        outcome = stress(devices, 0.001)
        assert outcome.rows() == []
        assert {name for _, name in outcome.counts} == {*computations("cpu", len(devices))}
        assert all(counts.results >= 5 for counts in outcome.counts.values())


def test_two_devices_that_disagree_have_no_majority() -> None:
    outcome = stress(THREE[:2], 0.001, Flip(0, 1.0, 3))
    assert {row.target for row in outcome.rows()} == {"no majority"}


def test_a_device_that_torch_does_not_know_is_one_line() -> None:
    with pytest.raises(NumericsError, match=r"cuda:7 gives no answer: .*; fix: name devices"):
        stress(["cuda:7"], 0.001)


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


@pytest.mark.parametrize("text", ["3:0.1:2", "0:2:1", "0:0.1:63", "x"])
def test_a_drill_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(NumericsError, match="fix: DEVICE:RATE:BIT"):
        parse_fault(text, 3)


def test_make_stress_writes_the_golden_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert make_stress.configured_ranks() == 1
    (tmp_path / ".config").write_text("CONFIG_RANKS=3\n")
    assert make_stress.configured_ranks() == 3
    monkeypatch.setattr(make_stress, "configured_ranks", lambda: 1)
    monkeypatch.setattr("sys.argv", ["scripts.stress", "--minutes=0.001", "--out=out"])
    assert make_stress.main() == 0
    assert "no device deviates" in capsys.readouterr().out
    (file,) = Path("out").glob("stress-*.json")
    assert set(json.loads(file.read_text())["golden"]) == {*computations("cpu", 1)}
    monkeypatch.setattr("sys.argv", ["scripts.stress", "--minutes=x"])
    with pytest.raises(UserError, match="MINUTES=x is not a number; fix"):
        make_stress.main()


def test_wrong_minutes_and_folders_are_known_before_the_stress(tmp_path: Path) -> None:
    with pytest.raises(NumericsError, match="0 minutes cannot be used; fix"):
        run_command(0, tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(NumericsError, match="file cannot be written: it is not a folder; fix"):
        run_command(1, tmp_path / "file", ["no device"])
