"""What a report makes of runs that trained for much less than the time that they were given."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from gpt2.artifacts import run_record
from gpt2.system import files
from study.analysis.timing import EARLY
from study.compare import build as compare
from study.compare import markdown as compare_render
from study.compare.ranking import rank
from study.report import build as report
from study.report import figures_final
from study.report import markdown as render
from study.report import page as html_report
from study.report.build import Report
from tests.study.sample_records import STEPS, VARIANTS, a_study, edit

SECONDS = 10 * STEPS  # that the runs of a study trained for


def planned(study: Path, **budget: Any) -> Report:
    files.write_json(study / "plan.json", {"budget": budget, "notes": []})
    return report.build_report(study)


def flat(text: str) -> str:
    return " ".join(text.split())


def pages(made: Report, study: Path) -> tuple[str, str, str]:
    """The report in Markdown, on the terminal and as a page."""
    page = re.sub("<[^>]*>", "", html_report.document(made, study))
    return flat(render.markdown(made)), flat(render.terminal(made)), flat(page)


@pytest.mark.parametrize(
    ("given", "early"), [(1.0, False), (0.99 / EARLY, False), (1.01 / EARLY, True), (3.0, True)]
)
def test_runs_that_trained_for_much_less_than_they_were_given_are_not_called_equal_in_time(
    tmp_path: Path, given: float, early: bool
) -> None:
    """given: the budget, in what each of the study's runs trained for. All ended at the same tokens: judged there."""
    study = a_study(tmp_path / "one", effect=0.2)
    made = planned(study, max_time_seconds=given * SECONDS)
    assert bool(made.early) is early
    assert made.misplanned == {}
    assert [seen.beyond_noise for seen in made.judged] == [True]
    for told in pages(made, study):
        assert (f"than the {given * SECONDS:,.0f} s that a run was given: B {SECONDS:,} s" in told) is early
    assert ("At equal time: the last step" in render.markdown(made)) is not early


@pytest.mark.parametrize("other", ["max_tokens", "max_iterations", "equal_tokens"])
def test_runs_that_another_limit_may_have_ended_are_not_said_to_have_ended_early(
    tmp_path: Path, other: str
) -> None:
    made = planned(a_study(tmp_path / "one"), **{"max_time_seconds": 9 * SECONDS, other: 10})
    assert not made.early
    assert not made.misplanned


@pytest.mark.parametrize("apart", [False, True])
def test_a_variant_that_trained_for_much_less_time_than_the_arms_has_no_verdict_where_it_ended(
    tmp_path: Path, apart: bool
) -> None:
    """It is far worse, by fewer steps than the arms': than fit into its time, or hardly."""
    study = a_study(tmp_path / "one", effect=2.0, ends={"RALEARN": 220 if apart else 230})
    for folder in (study / "runs").glob("B*"), (study / "runs").glob("RALEARN*"):
        for run in folder:
            tokens = run_record.load(run)["progress"]["tokens"]
            files.write_json(run / "validation_windows.json", {"tokens": tokens, "losses": [4.0, 5.0, 6.5]})
    made = planned(study, max_time_seconds=SECONDS)
    assert [*made.misplanned] == ["RALEARN"] * apart
    assert len(made.judged) == (not apart)
    assert len(made.judged_equal_tokens) == 1
    against = {row.variant: row.against_baseline for row in made.rows}
    assert (against["RALEARN"] is None) is apart
    assert against["RAALL"] is not None
    assert made.floor is not None
    drawn = figures_final.differences(made)
    assert drawn is not None
    assert ("RALEARN" in str(drawn["data"])) is not apart
    assert [window.variant for window in made.evidence.windows] == ["RALEARN"] * (not apart)
    for told in pages(made, study):
        held = "ended neither at equal tokens nor at equal time (trained for 2,200 s, the equivalent arms for"
        assert (held in told) is apart
    assert ("**RALEARN** at the end of its budget: worse than" in render.markdown(made)) is not apart


def test_a_study_with_a_misplanned_variant_gives_it_no_place_among_others(tmp_path: Path) -> None:
    ends = {"one": 220, "other": 250}
    one, other = (a_study(tmp_path / name, effect=2.0, ends={"RALEARN": end}) for name, end in ends.items())
    planned(one, max_time_seconds=2 * SECONDS)
    planned(other, max_time_seconds=SECONDS)
    compared = compare.build_comparison([one, other])
    places = [{place.variant for place in rank(study).places} for study in compared.studies]
    assert [len(names) for names in places] == [4, 5]
    assert "RALEARN" not in places[0]
    told = flat(compare_render.markdown(compared))
    assert "**one**: trained for much less than" in told
    assert (
        "left out since they ended at other tokens and what that may be worth is not known: RALEARN" in told
    )
    assert "left out for want of these seeds" not in told
    assert "**other**: trained" not in told


@pytest.mark.parametrize(
    ("given", "ends", "apart"),
    [
        (1.0, {"RALEARN": 230}, []),  # 0.77 of the arms' time
        (1.0, {"RALEARN": 220}, ["RALEARN"]),
        (3.0, {"RALEARN": 280}, []),  # all early, and nearly alike
        (1.0, {"RALEARN": 299, "OWN": 150}, ["OWN"]),  # added on a busy night: holds back none else
        (1.0, {name: 150 for name in VARIANTS if name != "RALEARN"}, ["RALEARN", "OWN"]),
    ],
)
def test_a_verdict_is_held_back_where_times_are_far_apart_and_from_nothing_else(
    tmp_path: Path, given: float, ends: dict[str, int], apart: list[str]
) -> None:
    study = a_study(
        tmp_path / "one", variants=(*VARIANTS, "OWN"), ends=ends | {"OWN": ends.get("OWN", STEPS)}
    )
    made = planned(study, max_time_seconds=given * SECONDS)
    assert [*made.misplanned] == apart
    assert {seen.variant for seen in made.judged} == {"RALEARN", "OWN"} - {*apart}


def test_runs_that_were_cut_short_hold_back_nothing(tmp_path: Path) -> None:
    study = a_study(tmp_path / "one", ends={"RALEARN": 299})
    edit(study, "RAALL1", schedule={"cut": True}, progress={"tokens": 7, "train_seconds": 11.0 * STEPS})
    assert planned(study, max_time_seconds=SECONDS).misplanned == {}


def test_a_study_without_equivalent_arms_has_the_reason_that_it_had(tmp_path: Path) -> None:
    study = a_study(tmp_path / "one", variants=("RALEARN", "OWN"), ends={"OWN": 100})
    made = planned(study, max_time_seconds=SECONDS)
    assert made.misplanned == {}
    assert "no seed of it has equivalent arms" in render.markdown(made)


def test_times_are_compared_at_the_seeds_that_a_variant_has(tmp_path: Path) -> None:
    """The machine was busy through seed 0 and not after it; the variant has no other seed yet."""
    study = a_study(tmp_path / "one", ends={"RALEARN": 299})
    for seed in (1, 2):
        shutil.rmtree(study / "runs" / f"RALEARN{seed}")
        for name in VARIANTS[:-1]:
            edit(study, f"{name}{seed}", progress={"train_seconds": 0.4 * SECONDS})
    made = planned(study, max_time_seconds=SECONDS)
    assert made.early == [*VARIANTS[:-1]]
    assert made.misplanned == {}
    assert len(made.judged) == 1
    edit(study, "RALEARN0", progress={"train_seconds": 0.4 * SECONDS})
    made = planned(study, max_time_seconds=SECONDS)
    assert {name: (seen.own, seen.arms) for name, seen in made.misplanned.items()} == {
        "RALEARN": (0.4 * SECONDS, SECONDS)
    }


def test_a_variant_that_is_set_apart_is_not_said_to_be_at_equal_time(tmp_path: Path) -> None:
    study = a_study(tmp_path / "one", ends={"RALEARN": 220})
    for run in (study / "runs").iterdir():
        seen = run_record.load(run)["progress"]["train_seconds"]
        edit(study, run.name, progress={"train_seconds": 1.08 * seen})
    made = planned(study, max_time_seconds=SECONDS)
    assert made.early == []
    assert [*made.misplanned] == ["RALEARN"]
    assert "At equal time: the last step" not in render.markdown(made)
