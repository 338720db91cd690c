import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from runtime import records
from runtime.errors import UserError
from study.analysis.verdict import BETTER, CANNOT_TELL, EQUIVALENT, INTERIM, WORSE
from study.compare import compared_studies as build
from study.compare.compared_studies import AGREE, ALONE, CONTRADICT, NONE, SOME, verdict_agreement
from study.compare.loaded_studies import labels
from tests.study.compared import (
    Settings,
    a_study,
    markdown,
    recorded,
    terminal,
)

ROOT = Path(__file__).parents[3]


def test_seeds_and_variants_are_compared_where_shared(first: Path, tmp_path: Path) -> None:
    other = a_study(tmp_path / "two", seeds=(1, 2), variants=("B", "RAALL"))
    comparison = build.build_comparison([first, other])
    differing = {check.subject: check.status for check in comparison.checks if check.status != "equal"}
    assert differing == {"variants": "harmless", "seeds": "harmless"}
    assert [(row.variant, row.seeds) for row in comparison.absolute] == [
        ("B", [1]),
        ("RAALL", [1]),
        (build.ARMS, [1]),
    ]
    apart = build.build_comparison([first, a_study(tmp_path / "three", seeds=(5,))])
    assert [reason.split(" ")[0] for reason in apart.reasons] == ["seeds"]
    assert apart.absolute == []


def test_the_difference_at_equal_tokens_and_its_interval_equal_those_of_scipy(
    first: Path, tmp_path: Path
) -> None:
    other = a_study(tmp_path / "two", seeds=(0, 1, 2), noise=1, shift=0.1)
    row = next(row for row in build.build_comparison([first, other]).absolute if row.variant == "RALEARN")
    values = [
        [json.loads((folder / "runs" / f"RALEARN{seed}" / "run.json").read_text())["validation"]["loss"]
         for seed in (0, 1)] for folder in (first, other)
    ]  # fmt: skip
    differences = np.subtract(values[1], values[0])
    low, high = stats.t.interval(0.95, 1, loc=differences.mean(), scale=stats.sem(differences))
    found = row.differences[0]
    assert row.seeds == [0, 1]
    assert (found.mean, found.low, found.high) == pytest.approx((differences.mean(), low, high))


@pytest.mark.parametrize(
    ("words", "agreement"),
    [
        ((BETTER, BETTER), AGREE),
        ((BETTER, WORSE, CANNOT_TELL), CONTRADICT),
        ((BETTER, EQUIVALENT), SOME),
        ((CANNOT_TELL, INTERIM), NONE),
        ((BETTER,), ALONE),
    ],
)
def test_verdicts_of_studies_agree_contradict_or_neither(words: tuple[str, ...], agreement: str) -> None:
    assert verdict_agreement(words) == agreement


def test_excluded_runs_are_named_and_change_no_number(first: Path, tmp_path: Path) -> None:
    def spoil(value: dict[str, Any], config: Settings) -> None:
        if value["run"] == "B0":
            value |= {"status": "failed", "error": "NotFiniteError: loss | <b>nan</b>"}
            value["validation"]["loss"] = 99.0

    folder = a_study(tmp_path / "two", spoil)
    (folder / "runs" / "RAALL1" / "run.json").write_text("{")
    records.write(folder / "runs" / "RALATE0" / "run.json", {"schema": 9})
    records.write(folder / "expected.json", {"variants": ["B"], "seeds": 4})  # two runs are pending
    comparison = build.build_comparison([first, folder])
    rows = {row.variant: row.seeds for row in comparison.absolute}
    assert rows == {"B": [1], "RAEARLY": [0, 1], "RALATE": [1], "RAALL": [0], "RALEARN": [0, 1]}
    text = markdown(comparison)
    assert "two: 7 of 12 runs count" in text
    for run, status in (("RAALL1", "unreadable"), ("RALATE0", "unreadable"), ("B0", "diverged")):
        assert f"| two | {run} | {status} |" in text
    assert "<b>" not in text
    assert "is of schema 9" in text
    assert max(row.losses[1].mean for row in comparison.absolute) < 5


def test_a_study_without_a_finished_run_is_reported_and_not_compared(first: Path, tmp_path: Path) -> None:
    empty = tmp_path / "two"
    (empty / "runs").mkdir(parents=True)
    comparison = build.build_comparison([first, empty])
    assert (comparison.absolute, comparison.relative, comparison.checks) == ([], [], [])
    assert comparison.reasons == ["two has no finished run"]
    assert "Nothing to compare" in terminal(comparison)


def test_three_studies_are_compared_with_the_first(first: Path, tmp_path: Path) -> None:
    comparison = build.build_comparison(
        [first, a_study(tmp_path / "two", noise=1), a_study(tmp_path / "three", noise=2)]
    )
    assert {len(row.differences) for row in comparison.absolute} == {2}
    assert {line.studies for line in comparison.alignments} == {("one", "two"), ("one", "three")}


def test_incomparable_studies_are_an_error_of_one_line_with_the_fix(first: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for paths, message in (
        ([], "none was named"),
        ([first], "alone was named"),
        ([first, tmp_path / "nowhere"], "is not a folder"),
        ([first, tmp_path / "empty"], "is not a study"),
        ([first, first.parent / "." / first.name], "is named twice"),
    ):
        with pytest.raises(UserError) as raised:
            build.build_comparison(paths)
        assert message in str(raised.value)
        assert "fix: " in str(raised.value)
        assert "\n" not in str(raised.value)


def test_studies_of_one_name_are_labelled_by_their_parent_folders(tmp_path: Path) -> None:
    assert labels([tmp_path / "a" / "results" / "x", tmp_path / "b" / "results" / "x"]) == [
        "a/results/x",
        "b/results/x",
    ]
    assert labels([tmp_path / "x", tmp_path / "y"]) == ["x", "y"]


def test_the_command_writes_its_files_without_torch(first: Path, tmp_path: Path) -> None:
    other = a_study(tmp_path / "two", recorded("target", "device", to="<script>alert(1)</script>"))
    command = [
        sys.executable,
        "-m",
        "scripts.compare",
        str(first),
        str(other),
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.split("\nwrote ")[0].splitlines())) <= 100
    assert "<script>" not in (tmp_path / "out" / "compare.md").read_text()
    content = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert content["absolute"][0]["differences"][0]["mean"] == 0
    html = (tmp_path / "out" / "compare.html").read_text()
    assert "<script>alert" not in html
    assert all(f'id="{name}"' in html for name in ("changes", "curves0"))
    second = subprocess.run(
        [*command[:4], str(other), "--out", str(other)], cwd=ROOT, capture_output=True, text=True
    )
    assert second.returncode == 1
    assert second.stderr.startswith("error: ")
    code = "import sys, scripts.compare, study.compare.compare_page; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
