import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import run_record
from runtime.metrics_log import read_steps
from study.compare import compared_studies
from study.compare import compared_studies as build
from tests.study.compared import a_study


def curve(values: np.ndarray[Any, Any]) -> dict[int, float]:
    return {k: float(v) for k, v in enumerate(values, 1)}


def test_errors_equal_those_of_numpy_and_the_divergence_is_at_its_known_step() -> None:
    base = 3 + 7 / np.arange(1, 1001)
    other = base.copy()
    other[600:] *= 1.05
    difference = compared_studies.relative_difference(curve(base), curve(other))
    found = compared_studies.summarize(difference)
    expected = np.abs(other - base) / base
    assert (found.first, found.early) == (0.0, 0.0)
    assert found.late == pytest.approx(expected[-100:].mean())
    at = compared_studies.parts_at(difference, compared_studies.TOLERANCE)
    assert at == 601
    assert compared_studies.parts_at(difference, 0.06) is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=400))
def test_running_means_equal_those_of_numpy(values: list[float]) -> None:
    width = min(len(values), max(5, len(values) // 50))
    expected = np.convolve(values, np.ones(width) / width, mode="valid")
    means = compared_studies.running_means(curve(np.array(values)))
    assert list(means) == list(range(1, len(expected) + 1))
    assert list(means.values()) == pytest.approx(expected, abs=1e-12)


def test_a_run_is_judged_by_one_percent_and_by_the_spread_of_equivalent_arms(
    first: Path, tmp_path: Path
) -> None:
    same = build.build_comparison([first, a_study(tmp_path / "two")])
    assert len(same.alignments) == 10
    assert all(line.within_tolerance and line.within_control_errors for line in same.alignments)
    assert all(line.errors.late == 0 and line.differs_from is None for line in same.alignments)
    assert all(line.control_errors and line.control_errors.late > 0 for line in same.alignments)

    folder = a_study(tmp_path / "three")
    path = folder / "runs" / "B0" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[50:]:
        line["loss"] *= 1.2
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"event": "tra')
    run_record.write(path.parent, run_record.load(path.parent))
    comparison = build.build_comparison([first, folder])
    line = next(line for line in comparison.alignments if line.run == "B0")
    assert not line.within_tolerance
    assert line.within_control_errors is False
    assert [one.within_control_errors for one in comparison.alignments if one.run != "B0"] == [True] * 9
    assert (line.differs_from, line.parts_from) == (51, 51)
    assert len(line.curve) <= compared_studies.POINTS
    assert sum(one.within_tolerance for one in comparison.alignments) == 9


@pytest.mark.parametrize(("share", "within"), [(0.5, True), (1.5, False)])
def test_the_first_step_is_compared_with_the_first_step_of_equivalent_arms(
    first: Path, tmp_path: Path, share: float, within: bool
) -> None:
    folder = a_study(tmp_path / "two")
    limit = build.build_comparison([first, folder]).alignments[0].control_errors
    assert limit
    path = folder / "runs" / "RALEARN0" / "metrics.jsonl"  # no arm, so that the limit does not change
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["loss"] *= 1 + share * limit.first
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_record.write(path.parent, run_record.load(path.parent))
    comparison = build.build_comparison([first, folder])
    line = next(line for line in comparison.alignments if line.run == "RALEARN0")
    assert line.control_errors == limit
    assert line.errors.first == pytest.approx(share * limit.first)
    assert line.errors.early < limit.early
    assert line.within_control_errors is within
    assert sum(bool(one.within_control_errors) for one in comparison.alignments) == 9 + within


def test_lines_without_training_losses_are_skipped(tmp_path: Path) -> None:
    step: dict[str, Any] = {"event": "train", "iteration": 1, "tokens": 8, "train_seconds": 1.0, "loss": 4.0}
    lines = [json.dumps(line) for line in (
        step, {"event": "validation", "loss": 9.0}, [], None, step | {"iteration": True}, step | {"loss": math.nan},
        step | {"loss": 5.0}, {"event": "train", "iteration": 3}, "x",
    )]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, "{"]))
    found = read_steps(tmp_path / "metrics.jsonl")
    assert compared_studies.losses(found) == {1: 5.0}
    assert compared_studies.losses(read_steps(tmp_path / "absent")) == {}
