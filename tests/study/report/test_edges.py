"""Reports on unusual, hostile, incomplete and surplus records."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from referee.pages.markup import to_markdown
from study import runs
from study.report import method as sentences
from study.report import report_data as build
from study.report import report_page as write
from study.report import report_summary as summary
from tests.checked_files import write_checked
from tests.study import sample_records as records
from tests.study.report import rendered
from tests.study.sample_records import VARIANTS, edit, with_derived


def a_record(name: str, seed: int, loss: float) -> dict[str, Any]:
    return records.a_record(name, seed, loss) | {"memory": None, "throughput": None, "clock": None}


def put(study: Path, value: dict[str, Any], folder: str = "") -> None:
    path = study / "runs" / (folder or value["run"])
    path.mkdir(parents=True)
    write_checked(path / "run.json", with_derived(value))


def a_study(study: Path, variants: tuple[str, ...] = VARIANTS, seeds: int = 3, noise: float = 0.005) -> Path:
    """Seeds differ by 0.02 nats and runs of one seed by `noise`; no variant has an effect."""
    draw = np.random.default_rng(0)
    for seed in range(seeds):
        base = 4.0 + 0.02 * float(draw.normal())
        for name in variants:
            put(study, a_record(name, seed, base + noise * float(draw.normal())))
    return study


def why_not(built: build.Report) -> dict[str, str]:
    return {run.name: run.why_not for run in built.runs if not run.used}


def test_unknown_parts_of_a_record_do_not_break_the_report(tmp_path: Path) -> None:
    report = write.write_report(a_study(tmp_path))
    assert all(run.used for run in report.runs)
    assert {row.peak_memory_bytes for row in report.rows} == {None}
    assert "HellaSwag" not in rendered.terminal(report)


@pytest.mark.parametrize(
    "part", ["validation", "progress", "fingerprint", "batch", "target", "environment", "schedule"]
)
def test_a_finished_record_without_a_required_part_is_named_and_not_averaged(
    tmp_path: Path, part: str
) -> None:
    study = a_study(tmp_path)
    edit(study, "RAALL1", **{part: None})
    assert part in why_not(build.build_report(study))["RAALL1"]


def test_a_loss_that_is_not_finite_does_not_count(tmp_path: Path) -> None:
    study = a_study(tmp_path)
    edit(study, "B1", validation={"loss": float("nan")})
    report = build.build_report(study)
    assert why_not(report) == {"B1": "it has no finite validation loss"}
    assert next(row for row in report.rows if row.variant == "B").seeds == [0, 2]


def test_a_copied_run_is_not_counted_twice(tmp_path: Path) -> None:
    study = a_study(tmp_path)
    put(study, a_record("B", 0, 4.0), folder="B0-copy")
    report = build.build_report(study)
    assert "its record is that of B0" in why_not(report)["B0-copy"]
    assert next(row for row in report.rows if row.variant == "B").seeds == [0, 1, 2]


def test_every_differing_entry_of_a_fingerprint_is_named(tmp_path: Path) -> None:
    study = a_study(tmp_path)
    edit(study, "RALATE1", fingerprint={"data": "other", "schedule": "other", "numbers": 2})
    edit(study, "RAALL2", fingerprint={"initial_weights": "other"})
    reasons = why_not(build.build_report(study))
    assert "differs in data, schedule, numbers from that of most runs" in reasons["RALATE1"]
    assert "differs in initial_weights from that of most runs of seed 2" in reasons["RAALL2"]
    assert len(reasons) == 2


def test_without_a_majority_the_experiment_of_the_baseline_counts(tmp_path: Path) -> None:
    study = a_study(tmp_path, variants=("ABOVE", "B"), seeds=1)
    edit(study, "ABOVE0", fingerprint={"model": "other"})
    reasons = why_not(build.build_report(study))
    assert list(reasons) == ["ABOVE0"]
    assert "from that of the baseline" in reasons["ABOVE0"]


def test_a_variant_with_a_missing_seed_is_judged_at_the_others(tmp_path: Path) -> None:
    study = a_study(tmp_path, seeds=4)
    (study / "runs" / "RALEARN2" / "run.json").unlink()
    report = build.build_report(study)
    assert report.floor is not None
    assert report.floor.dof == 12
    assert (report.verdicts[0].seeds, report.verdicts[0].controls) == (3, [4, 4, 4])


def test_one_arm_under_two_names_does_not_shrink_the_noise(tmp_path: Path) -> None:
    study = a_study(tmp_path, seeds=1)
    before = build.build_report(study).floor
    twin = next(run.record for run in build.build_report(study).runs if run.name == "RALATE0")
    put(study, a_record("RAALT", 0, twin.validation.loss))
    assert build.build_report(study).floor == before


def test_runs_without_any_noise_give_no_verdict(tmp_path: Path) -> None:
    study = a_study(tmp_path, noise=0.0)
    edit(study, "RALEARN0", validation={"loss": 3.0})
    text = rendered.markdown(build.build_report(study))
    assert "**RALEARN** (exploratory): cannot tell" in text
    assert "better than" not in text


def test_the_noise_of_the_control_arms_does_not_affect_the_verdict(tmp_path: Path) -> None:
    """RALEARN lies far outside the arms' noise, but its differences vary as much as their mean."""
    study = a_study(tmp_path)
    for seed, difference in enumerate((0.0, 0.05, 0.1)):
        arms = [
            json.loads((study / "runs" / f"{name}{seed}" / "run.json").read_text())["validation"]["loss"]
            for name in VARIANTS[:-1]
        ]
        edit(study, f"RALEARN{seed}", validation={"loss": sum(arms) / len(arms) + difference})
    report = build.build_report(study)
    assert report.floor is not None
    assert report.verdicts[0].test.difference.mean > 3 * report.floor.sigma
    sentence = to_markdown(summary.findings(report)[0].sentence)
    assert sentence.startswith("**RALEARN** (exploratory): cannot tell whether it is better or worse")


def test_several_changes_are_judged_together(tmp_path: Path) -> None:
    report = build.build_report(a_study(tmp_path, variants=(*VARIANTS, "MINE")))
    assert [verdict.judged_together for verdict in report.verdicts] == [2, 2]
    assert all((verdict.adjusted_p or 0) >= (verdict.test.p_value or 0) for verdict in report.verdicts)


def test_a_control_arm_that_differs_from_the_others_is_a_warning_about_the_pipeline(tmp_path: Path) -> None:
    study = a_study(tmp_path)
    assert "Warning" not in rendered.markdown(build.build_report(study))
    for seed in range(3):
        loss = json.loads((study / "runs" / f"B{seed}" / "run.json").read_text())["validation"]["loss"]
        edit(study, f"RAALL{seed}", validation={"loss": loss + 0.5})
    report = build.build_report(study)
    assert "RAALL" in report.odd_controls
    assert "differs from the other control arms by more than chance" in rendered.markdown(report)


def test_a_real_change_has_one_verdict_with_its_number(tmp_path: Path) -> None:
    report = build.build_report(a_study(tmp_path, seeds=5))
    text, interval = rendered.markdown(report), report.verdicts[0].test.difference
    assert interval.low is not None
    assert interval.high is not None
    assert text.count("**RALEARN**") == 1
    assert f"[{sentences.percent(interval.low)}, {sentences.percent(interval.high)}]" in text


def test_the_primary_comparison_is_first_although_another_arm_has_a_lower_loss(tmp_path: Path) -> None:
    report = build.build_report(a_study(tmp_path, variants=("B", "RAALL", "RALEARN", "GATED")))
    first, last = [row.variant for row in report.rows if not row.control]
    verdicts = [
        dataclasses.replace(one, role="primary") if one.variant == last else one for one in report.verdicts
    ]
    found = summary.findings(dataclasses.replace(report, verdicts=verdicts))
    assert [to_markdown(one.sentence).split("**")[1] for one in found] == [last, first]


def test_the_next_step_has_its_number_and_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo").mkdir()
    study = a_study(tmp_path / "demo", seeds=2)
    assert "CONFIG_SEEDS=3" in rendered.terminal(build.build_report(study))
    write_checked(study / "expected.json", {"variants": list(VARIANTS), "seeds": 3})
    report = build.build_report(study)
    for arms, command in ((set(), "`make`"), (set(VARIANTS), "`make demo`")):
        monkeypatch.setattr(summary, "DEMO_ARMS", arms)
        step = to_markdown(summary.next_step(report))
        assert "5 of 15 runs" in step
        assert command in step
    finished = a_study(tmp_path / "failed")
    edit(finished, "RAALL1", status="failed", error="x")
    step = to_markdown(summary.next_step(build.build_report(finished)))
    assert "RAALL1" in step
    assert "`make`" in step


def test_a_run_that_diverged_is_counted_as_that_and_its_arm_is_not_judged(tmp_path: Path) -> None:
    study = a_study(tmp_path)
    write_checked(study / "expected.json", {"variants": list(VARIANTS), "seeds": 3})
    before = build.build_report(study)
    error = "NotFiniteError: iteration 7: loss nan, gradient norm nan"
    edit(study, "RALEARN1", status="failed", error=error)
    report = build.build_report(study)
    (run,) = [run for run in report.runs if run.name == "RALEARN1"]
    assert (run.used, run.cause, run.why_not) == (False, "diverged", f"it diverged: {error}")
    (line,) = [line for line in summary.context(report) if "not counted" in line]
    assert "RALEARN1 (diverged)" in line
    assert "CONFIG_LEARNING_RATE" in to_markdown(summary.next_step(report))
    (verdict,) = report.verdicts
    assert (verdict.word in ("interim", "cannot tell"), verdict.adjusted_p) == (True, None)
    (row,) = [row for row in report.rows if row.variant == "RALEARN"]
    assert [one.adjusted_p for one in before.verdicts] != [None]
    losses = [each.record.validation.loss for each in before.runs if each.name in ("RALEARN0", "RALEARN2")]
    assert row.final_loss
    assert row.final_loss.mean == pytest.approx(sum(losses) / 2)


def test_pending_runs_are_not_listed_as_excluded(tmp_path: Path) -> None:
    study = a_study(tmp_path, seeds=1)
    edit(study, "RALEARN0", status="running")
    write_checked(study / "expected.json", {"variants": list(VARIANTS), "seeds": 5})
    report = build.build_report(study)
    assert not any("not counted" in line for line in summary.context(report))
    assert to_markdown(summary.next_step(report)).startswith("Next: 21 of 25 runs are pending.")
    assert "no finished run" in to_markdown(summary.no_verdict(report))
    edit(study, "RALEARN0", status="finished", fingerprint={"data": "other"})
    assert "no counted run" in to_markdown(summary.no_verdict(build.build_report(study)))


def test_a_study_of_control_arms_alone_has_no_verdict(tmp_path: Path) -> None:
    report = build.build_report(a_study(tmp_path, variants=("B", "RAALL")))
    assert summary.findings(report) == []
    assert "CONFIG_VARIANTS" in to_markdown(summary.no_verdict(report))
    assert summary.next_step(report) == ""


def test_different_commits_devices_and_uncommitted_changes_are_reported(tmp_path: Path) -> None:
    study = a_study(tmp_path)
    assert not build.build_report(study).notes
    edit(study, "B0", commit="d" * 40, dirty=True, target={"device": "another"})
    notes = " ".join(build.build_report(study).notes)
    assert "different commits: cccccccccccc (14), dddddddddddd (1)" in notes
    assert "1 of 15 runs had uncommitted changes" in notes
    assert "different devices" in notes


def test_damaged_side_files_are_treated_as_missing(tmp_path: Path) -> None:
    study = a_study(tmp_path)
    for name in ("plan.json", "expected.json"):
        (study / name).write_bytes(b"\xff[")
    (study / "runs" / ".DS_Store").write_text("")
    assert len(build.build_report(study).runs) == 15


def test_hostile_strings_are_escaped_in_the_terminal_and_in_notes(tmp_path: Path) -> None:
    study = a_study(tmp_path)
    edit(study, "B0", notes=["\x1b[2J<img src=x>"], target={"dtype": "<i>"})
    report = build.build_report(study)
    assert "\x1b" not in rendered.terminal(report) + rendered.markdown(report)
    assert "<img" not in rendered.markdown(report)
    assert "<i>" not in rendered.markdown(report)


@pytest.mark.parametrize("loss", [0.1, 9.9, 40.0, 400.0])
def test_every_terminal_line_fits_a_hundred_columns(tmp_path: Path, loss: float) -> None:
    study = a_study(tmp_path, seeds=2)
    for variant in VARIANTS:
        edit(study, f"{variant}0", validation={"loss": loss})
    put(study, a_record("B", 0, 4.0), folder="B0-" + "copy" * 30)
    assert max(len(line) for line in rendered.terminal(build.build_report(study)).splitlines()) <= 100


def test_small_differences_are_printed_with_their_digits_and_zero_without_a_sign() -> None:
    assert sentences.percent(0.00012) == "+0.012 %"
    assert sentences.percent(-0.000001) == "+0.000 %"
    assert sentences.percent(900.0).endswith(" %")


def test_the_report_needs_no_torch() -> None:
    code = "import sys, scripts.report, study.report.report_page; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(runs.__file__).parents[1]).returncode == 0


def test_an_arm_with_standard_attention_is_compared_with_the_control_arms() -> None:
    for name in ("B+LR=1e-3", "RAALL+NORM=rms", "RA:0+WD=0", "RMS", "SWIGLU+LR=1e-3"):
        assert summary.contrast(name) == "the control arms"
    for name in ("RALEARN", "GATED+LR=1e-3", "RALEARN+NORM=rms", "A_FILE_THAT_IS_GONE"):
        assert summary.contrast(name) == "standard attention"


def test_an_arm_with_a_rate_is_judged_against_the_control_arms_at_its_rate(tmp_path: Path) -> None:
    at_rate = ("B+LR=1e-3", "RAALL+LR=1e-3", "RALEARN+LR=1e-3")
    alone = build.build_report(a_study(tmp_path / "alone", variants=at_rate))
    losses = {(run.variant, run.seed): run.record.validation.loss for run in alone.runs}
    baseline, reciprocal, learned = (np.array([losses[name, seed] for seed in range(3)]) for name in at_rate)
    (verdict,) = alone.verdicts
    assert (verdict.variant, verdict.controls) == (at_rate[2], [2, 2, 2])
    assert verdict.test.difference.mean == pytest.approx(np.mean(learned - (baseline + reciprocal) / 2))
    assert alone.floor is not None
    assert alone.floor.dof == 3
    assert [row.control for row in alone.rows] == [True, True, False]

    mixed = a_study(tmp_path / "mixed", variants=(*at_rate, "B", "RALEARN", "B+WD=0", "NOPE+LR=2e-3"))
    for seed in range(3):
        for name in at_rate:  # a worse rate
            edit(mixed, f"{name}.{seed}", validation={"loss": losses[name, seed] + 1})
    report = build.build_report(mixed)
    found = {verdict.variant: verdict for verdict in report.verdicts}
    controls = {name: verdict.controls[0] for name, verdict in found.items()}
    assert controls == {at_rate[2]: 2, "RALEARN": 1, "B+WD=0": 1}
    assert found[at_rate[2]].test.difference.mean == pytest.approx(verdict.test.difference.mean)
    assert report.odd_controls == alone.odd_controls
    output = "**NOPE+LR=2e-3**: cannot tell: no seed of it has a control arm with LR=2e-3"
    assert output in rendered.markdown(report)
    rows = {row.variant: row for row in report.rows}
    assert rows["B"].against_controls is None
    assert abs(rows["RAALL+LR=1e-3"].against_controls.mean) < 0.1
