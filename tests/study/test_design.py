"""The primary comparison and the planned seeds: from plan.json to the first screen, and what changes them."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from referee.verdict.design import Design
from runtime import run_record
from study import amend_plan, plan_file
from study.analysis.verdict import BETTER, EXPLORATORY, INTERIM, PRIMARY
from study.plan_file import Plan, from_json
from study.report import report_data as build
from study.report import report_page as write
from study.study_settings import StudySettings
from study.verify import verify_study
from tests.checked_files import write_checked
from tests.study.report import rendered
from tests.study.sample_records import VARIANTS, a_design, a_plan, a_record, a_study, edit


def configured(
    folder: Path, runs: list[str], seeds: int, primary: str = "", variants: tuple[str, ...] = VARIANTS
) -> None:
    """Save the configuration of runs."""
    text = f'CONFIG_SEEDS={seeds}\nCONFIG_VARIANTS="{" ".join(variants)}"\nCONFIG_PRIMARY="{primary}"\n'
    for run in runs:
        (folder / "runs" / run).mkdir(parents=True, exist_ok=True)
        (folder / "runs" / run / "config").write_text(text)


def planned(
    folder: Path,
    looks: tuple[int, ...] = (3,),
    seeds: int = 3,
    present: int = 3,
    effect: float = -0.05,
    **content: Any,
) -> Path:
    """A study with a plan for its first look, of which `present` seeds ran and `seeds` are configured now."""
    a_study(folder, seeds=present, effect=effect)
    write_checked(folder / "plan.json", a_plan(**a_design(looks)) | content)
    write_checked(folder / "expected.json", {"variants": list(VARIANTS), "seeds": seeds})
    return folder


def verdict(folder: Path) -> Any:
    (found,) = build.build_report(folder).verdicts
    return found


def test_the_primary_verdict_is_in_report_json(tmp_path: Path) -> None:
    report = write.write_report(planned(tmp_path, effect=-0.025))
    assert (report.verdicts[0].word, report.verdicts[0].role) == (BETTER, PRIMARY)
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["verdicts"][0]["role"] == "primary"
    assert content["verdicts"][0]["exaggeration"] >= 1
    assert report.design
    assert content["design"]["sha256"] == report.design.digest


def test_a_plan_without_a_primary_comparison_says_that_all_verdicts_are_exploratory(tmp_path: Path) -> None:
    study = a_study(tmp_path, effect=-0.05)
    write_checked(study / "plan.json", a_plan())
    report = build.build_report(study)
    assert (report.verdicts[0].word, report.verdicts[0].role) == (BETTER, EXPLORATORY)


def test_before_the_planned_seeds_every_form_is_interim(tmp_path: Path) -> None:
    report = write.write_report(planned(tmp_path, looks=(5,), seeds=5, present=4))
    assert report.verdicts[0].word == INTERIM
    for text in (
        rendered.markdown(report),
        rendered.terminal(report),
        (tmp_path / "report.html").read_text(),
    ):
        words = " ".join(text.split())
        assert "interim, 4 of 5 planned seeds finished" in words
        assert "better than" not in words
        assert "Exploratory: the loss" not in words


def test_fewer_seeds_than_planned_stay_interim(tmp_path: Path) -> None:
    study = planned(tmp_path, looks=(3, 6), seeds=3, present=3)
    assert (verdict(study).word, verdict(study).finished) == (INTERIM, 3)
    assert "fix: set CONFIG_SEEDS=6 in .config" in rendered.terminal(build.build_report(study))


def test_a_run_that_failed_or_does_not_count_keeps_the_verdict_interim(tmp_path: Path) -> None:
    study = planned(tmp_path)
    for run, change in (
        ("RALEARN1", {"status": "failed", "error": "x"}),
        ("RAALL1", {"status": "failed", "error": "x"}),
        ("RAALL1", {"status": "finished", "fingerprint": {"data": "other"}}),
    ):
        edit(study, "RALEARN1", status="finished", error=None)
        edit(study, run, **change)
        assert (verdict(study).word, verdict(study).finished) == (INTERIM, 2)


def test_a_run_that_was_cut_short_is_left_out_and_keeps_no_verdict_back(tmp_path: Path) -> None:
    study = planned(tmp_path, looks=(4,), seeds=4, present=4)
    value = a_record("RALEARN", 3, 9.0, 60)
    value["schedule"] = {"iterations": 300, "cut": True}
    (study / "runs" / "RALEARN3" / "metrics.jsonl").unlink()
    write_checked(study / "runs" / "RALEARN3" / "run.json", value)
    found = verdict(study)
    assert (found.word, found.seeds, found.finished) == (BETTER, 3, 4)


def test_raised_seeds_are_a_look_at_a_stricter_level(tmp_path: Path) -> None:
    study = planned(tmp_path, looks=(3, 6), seeds=6, present=6)
    found = verdict(study)
    assert found.level == pytest.approx(0.00344, abs=2e-4)
    assert "looks at 3 and 6 seeds" in rendered.markdown(build.build_report(study))


def test_an_altered_design_is_named(tmp_path: Path) -> None:
    study = planned(tmp_path)
    assert "Warning" not in rendered.markdown(build.build_report(study))
    plan = json.loads((study / "plan.json").read_text())
    plan["design"]["margin"] = 0.02
    write_checked(study / "plan.json", plan)
    assert "does not have its SHA-256" in rendered.markdown(build.build_report(study))
    assert verify_study(study)[0].problems == [plan_file.ALTERED]


# ---- plan.json


def settings(
    folder: Path, seeds: int, variants: tuple[str, ...] = VARIANTS, primary: str = "RALEARN"
) -> StudySettings:
    return StudySettings("s", variants, seeds, folder, False, 0.01, primary)


def plan_for(*variants: str) -> Plan:
    value = a_plan()
    value["variants"] = dict.fromkeys(variants, value["variants"]["B"])
    return from_json(value)


def on_record(folder: Path, name: str, seeds: int, **options: Any) -> None:
    run = run_record.run_name(name, 0)
    configured(folder, [run], seeds, **options)
    write_checked(folder / "runs" / run / "run.json", a_record(name, 0, 4.0))


def test_the_plan_is_free_until_the_first_run_and_then_only_gains_looks(tmp_path: Path) -> None:
    plan = amend_plan.with_design(tmp_path, plan_for("B", "RALEARN"), settings(tmp_path, 9, ("B", "RALEARN")))
    plan = amend_plan.with_design(tmp_path, plan, settings(tmp_path, 5, ("B", "RALEARN")))
    assert plan.looks == {"RALEARN": (5,)}
    written = plan.design
    assert written == Design(("B",), ("RALEARN",), "RALEARN", tuple(range(5)), (5,), 0.01).hashed
    for name in ("B", "RALEARN"):
        on_record(tmp_path, name, 5)
    for seeds, expected in ((5, (5,)), (3, (5,)), (8, (5, 8)), (8, (5, 8)), (2, (5, 8)), (9, (5, 8, 9))):
        plan = amend_plan.with_design(tmp_path, plan, settings(tmp_path, seeds, ("B", "RALEARN"), "MINE"))
        assert plan.looks == {"RALEARN": expected}
    assert plan.design == written


def test_a_variant_that_is_added_later_has_its_first_look_at_the_present_seeds(tmp_path: Path) -> None:
    names = ("B", "RALEARN", "MINE")
    plan = amend_plan.with_design(tmp_path, plan_for(*names), settings(tmp_path, 3, names[:2]))
    for name in names[:2]:
        on_record(tmp_path, name, 3)
    plan = amend_plan.with_design(tmp_path, plan, settings(tmp_path, 6, names))
    assert plan.looks == {"RALEARN": (3, 6), "MINE": (6,)}
    assert plan.design
    assert plan.design.arms == ("RALEARN",)


def test_older_studies_at_these_seeds_count_as_looks(tmp_path: Path) -> None:
    text = 'CONFIG_LEARNING_RATE="1e-3"\nCONFIG_SEEDS=3\n'
    for name, changed in (("old", text), ("other", text.replace("1e-3", "2e-3")), ("new", text)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config").write_text(changed)
    for name in ("old", "other"):
        planned(tmp_path / name, looks=(3,), present=3)
    wanted = StudySettings("new", VARIANTS, 5, tmp_path, False, 0.01, "RALEARN")
    plan = amend_plan.with_design(tmp_path / "new", plan_for(*VARIANTS), wanted)
    assert plan.design
    assert (plan.design.earlier_looks, plan.looks) == ((3,), {"RALEARN": (3, 5)})
    for run in (tmp_path / "other/runs").iterdir():
        shutil.copytree(run, tmp_path / "new/runs" / run.name, dirs_exist_ok=True)
    write_checked(tmp_path / "new/plan.json", plan.to_json())
    text = " ".join(rendered.markdown(build.build_report(tmp_path / "new")).split())
    assert "Older studies judged RALEARN at 3 of these seeds" in text
    fresh = dataclasses.replace(wanted, first_seed=3)  # no study has judged these
    design = amend_plan.with_design(tmp_path / "fresh", plan_for(*VARIANTS), fresh).design
    assert design
    assert (design.seeds, design.earlier_looks) == ((3, 4, 5, 6, 7), ())
