"""What a report makes of runs that trained for much less than the time that they were given."""

import re
from pathlib import Path
from typing import Any

import pytest

from gpt2 import record
from study import compare, compare_render, figures_final, html_report, render, report
from study.compare_ranking import rank
from study.report import Report
from study.timing import EARLY
from tests.study.records import STEPS, a_study

SECONDS = 10 * STEPS  # that the runs of a study trained for


def planned(study: Path, **budget: Any) -> Report:
    record.write_json(study / "plan.json", {"budget": budget, "notes": []})
    return report.build(study)


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
    assert made.misplanned == []
    assert [seen.beyond_noise for seen in made.judged] == [True]
    for told in pages(made, study):
        assert (f"than the {given * SECONDS:,.0f} s that a run was given: B {SECONDS:,} s" in told) is early
    assert ("At equal time: the last step" in render.markdown(made)) is not early


@pytest.mark.parametrize("other", ["max_tokens", "max_iterations", "equal_tokens"])
def test_runs_that_another_limit_may_have_ended_are_not_said_to_have_ended_early(
    tmp_path: Path, other: str
) -> None:
    made = planned(a_study(tmp_path / "one"), **{"max_time_seconds": 9 * SECONDS, other: 10})
    assert made.early == made.misplanned == []


@pytest.mark.parametrize("busy", [False, True])
def test_a_variant_whose_count_was_timed_on_a_busy_machine_has_no_verdict_where_it_ended(
    tmp_path: Path, busy: bool
) -> None:
    """It is 20 % worse, by fewer steps than the arms': fewer than fit into its time, or as many as do."""
    study = a_study(tmp_path / "one", effect=0.2, ends={"RALEARN": 250})
    for folder in (study / "runs").glob("B*"), (study / "runs").glob("RALEARN*"):
        for run in folder:
            tokens = record.load(run)["progress"]["tokens"]
            record.write_json(run / "validation_windows.json", {"tokens": tokens, "losses": [4.0, 5.0, 6.5]})
    made = planned(study, max_time_seconds=SECONDS * (2 if busy else 1))
    assert made.misplanned == ["RALEARN"] * busy
    assert len(made.judged) == (not busy)
    assert len(made.judged_equal_tokens) == 1
    against = {row.variant: row.against_baseline for row in made.rows}
    assert (against["RALEARN"] is None) is busy
    assert against["RAALL"] is not None
    assert made.floor is not None
    drawn = figures_final.differences(made)
    assert drawn is not None
    assert ("RALEARN" in str(drawn["data"])) is not busy
    assert [window.variant for window in made.evidence.windows] == ["RALEARN"] * (not busy)
    for told in pages(made, study):
        held = "cannot tell: it ended neither at equal time nor at equal tokens, since it was planned on a busy machine"
        assert (held in told) is busy
    assert ("**RALEARN** at the end of its budget: worse than" in render.markdown(made)) is not busy


def test_a_study_that_was_planned_on_a_busy_machine_gives_the_variant_no_place_among_others(
    tmp_path: Path,
) -> None:
    one, other = (a_study(tmp_path / name, effect=0.2, ends={"RALEARN": 250}) for name in ("one", "other"))
    planned(one, max_time_seconds=2 * SECONDS)
    planned(other, max_time_seconds=SECONDS)
    compared = compare.build([one, other])
    places = [{place.variant for place in rank(study).places} for study in compared.studies]
    assert [len(names) for names in places] == [4, 5]
    assert "RALEARN" not in places[0]
    told = flat(compare_render.markdown(compared))
    assert "**one**: trained for much less than" in told
    assert "left out since they ended neither at equal time nor at equal tokens: RALEARN" in told
    assert "left out for want of these seeds" not in told
    assert "**other**: trained" not in told
