"""Compared studies of several model sizes: the trend of each effect, its figure, and what keeps it from a trend."""

import math
from pathlib import Path

import pytest

from study.compare.compare_sizes import CANNOT_TELL, HOLDS, SHRINKS, SizeComparison, effects_figure
from study.compare.compared_studies import build_comparison
from study.report.report_data import build_report
from tests.study.sample_records import a_study, edit
from tests.study.test_tuned_report import CHOSEN, TunedStudy, table

PARAMETERS = {"tiny": 150_000, "mini": 900_000, "small": 10_900_000}


def several(folder: Path, effects: dict[str, float], seeds: int = 5) -> list[Path]:
    """Studies of sizes in which RALEARN differs by these effects (nats)."""
    studies = []
    for size, effect in effects.items():
        study = a_study(folder / size, seeds, effect, ("B", "RAALL", "RALEARN"), hellaswag=False)
        for run in (study / "runs").iterdir():
            edit(study, run.name, parameters=PARAMETERS[size])
        studies.append(study)
    return studies


def sizes_of(studies: list[Path]) -> SizeComparison:
    found = build_comparison(studies).sizes
    assert found
    return found


def test_the_effects_are_the_verdicts_of_the_reports_and_hold_from_the_smallest_model_on(
    tmp_path: Path,
) -> None:
    studies = several(tmp_path, {"tiny": -0.05, "mini": -0.05, "small": -0.05})
    found = sizes_of(studies[::-1])
    (trend,) = found.trends
    assert (trend.arm, trend.word, found.problems) == ("RALEARN", HOLDS, [])
    assert trend.effects == [build_report(study).verdicts[0] for study in studies]
    tokens = 300 * 512 * 1024
    assert [(row.study, row.parameters, row.tokens, row.flops) for row in found.rows] == [
        (size, count, tokens, 6.0 * count * tokens) for size, count in PARAMETERS.items()
    ]
    figure = effects_figure(found)
    assert figure
    (drawn,) = figure["data"]
    assert drawn["y"] == [0, -1, -2]
    assert figure["layout"]["yaxis"]["ticktext"] == ["tiny, 0.15 M", "mini, 0.9 M", "small, 10.9 M"]
    assert drawn["x"] == [
        pytest.approx(100 * math.expm1(one.test.difference.mean)) for one in trend.effects if one
    ]


def test_few_seeds_give_no_trend_and_an_unfinished_study_is_named(tmp_path: Path) -> None:
    studies = several(tmp_path, {"tiny": -0.05}) + several(tmp_path, {"mini": -0.05}, seeds=2)
    (trend,) = sizes_of(studies).trends
    assert (trend.word, trend.contrast) == (CANNOT_TELL, None)
    edit(studies[1], "B0", status="failed", error="x")
    (problem,) = sizes_of(studies).problems
    assert problem.startswith("mini: 5 of 6 runs")


def test_sizes_of_other_text_are_not_compared(tmp_path: Path) -> None:
    studies = several(tmp_path, {"tiny": -0.05, "mini": -0.05})
    for run in (studies[1] / "runs").iterdir():
        edit(studies[1], run.name, fingerprint={"data": "f" * 64})
    found = sizes_of(studies)
    assert (found.trends, effects_figure(found)) == ([], None)
    assert "data" in found.problems[0]


@pytest.mark.parametrize("change", [{"parameters": 150_000}, {"fingerprint": {"tokenizer": "bytes"}}])
def test_studies_of_one_size_or_of_several_tokenizers_have_no_trend(
    tmp_path: Path, change: dict[str, object]
) -> None:
    studies = several(tmp_path, {"tiny": -0.05, "mini": -0.05})
    for run in (studies[1] / "runs").iterdir():
        edit(studies[1], run.name, **change)
    assert build_comparison(studies).sizes is None


def test_tuned_studies_give_the_effects_at_the_best_rates(tmp_path: Path) -> None:
    studies = []
    for size, effect in (("tiny", -0.1), ("mini", -0.04)):
        best = "2e-3" if size == "tiny" else "1e-3"
        losses = table(best, effect=effect, same=effect)
        tuned = TunedStudy(tmp_path / size, losses, CHOSEN | {"RALEARN": best})
        for run in (tuned.folder / "runs").iterdir():
            edit(tuned.folder, run.name, parameters=PARAMETERS[size])
        studies.append(tuned.folder)
    found = sizes_of(studies)
    (trend,) = found.trends
    assert (trend.arm, trend.role, trend.word, found.problems) == ("RALEARN", "primary", SHRINKS, [])
    assert [one.test.difference.mean for one in trend.effects if one] == [
        pytest.approx(-0.1, abs=0.01), pytest.approx(-0.04, abs=0.01),
    ]  # fmt: skip
