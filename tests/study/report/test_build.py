import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from runtime import records, run_record
from study.report import method as sentences
from study.report import report_data as build
from study.report import report_page as write
from study.report import report_summary as summary
from tests.checked_files import write_checked
from tests.study import sample_records
from tests.study.report import rendered
from tests.study.sample_records import STEPS, UPDATE, VARIANTS, with_derived

Change = Callable[[dict[str, Any]], None]


def a_record(name: str, seed: int, loss: float) -> dict[str, Any]:
    score = {"acc": 0.3, "acc_stderr": 0.005, "acc_norm": 0.31, "acc_norm_stderr": 0.005, "items": 10042}
    return sample_records.a_record(name, seed, loss) | {"hellaswag": score | {"items_sha256": "f" * 64}}


def a_study(
    folder: Path, seeds: int = 3, effect: float = 0.0, change: dict[str, Change] | None = None
) -> Path:
    """A believable study: seeds differ by 0.02 nats, runs of one seed by 0.005; RALEARN differs by `effect`."""
    draw = np.random.default_rng(0)
    for seed in range(seeds):
        base = 4.0 + 0.02 * draw.normal()
        for name in VARIANTS:
            loss = float(base + 0.005 * draw.normal() + (effect if name == "RALEARN" else 0.0))
            value = a_record(name, seed, loss)
            if name == "RALEARN":
                value["learned"] = {
                    "alternation_probability": [0.4, 0.6],
                    "history": [[1000, [0.5, 0.5]], [3000, [0.4, 0.6]]],
                }
            if change and value["run"] in change:
                change[value["run"]](value)
            run_dir = folder / "runs" / value["run"]
            run_dir.mkdir(parents=True)
            write_checked(run_dir / "run.json", with_derived(value))
    write_checked(folder / "expected.json", {"variants": list(VARIANTS), "seeds": seeds})
    return folder


def losses(built: build.Report, name: str) -> dict[int, float]:
    return {r.seed: r.record.validation.loss for r in built.runs
            if r.used and r.variant == name and r.record and r.seed is not None}  # fmt: skip


def row(built: build.Report, name: str) -> build.ArmRow:
    return next(r for r in built.rows if r.variant == name)


def test_every_interval_equals_that_of_scipy(tmp_path: Path) -> None:
    report = build.build_report(a_study(tmp_path))
    controls = [losses(report, name) for name in VARIANTS if row(report, name).control]
    for name in VARIANTS:
        values = losses(report, name)
        differences = [values[seed] - np.mean([arm[seed] for arm in controls]) for seed in values]
        low, high = stats.t.interval(0.95, 2, loc=np.mean(differences), scale=stats.sem(differences))
        found = row(report, name).against_controls
        assert found is not None
        assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


def test_a_real_change_is_judged_against_the_control_arms(tmp_path: Path) -> None:
    nothing = rendered.markdown(build.build_report(a_study(tmp_path / "nothing", seeds=2)))
    better = rendered.markdown(build.build_report(a_study(tmp_path / "better", effect=-0.05)))
    worse = rendered.markdown(build.build_report(a_study(tmp_path / "worse", effect=0.05)))
    assert "**RALEARN** (exploratory): cannot tell, 2 of 3 needed seeds finished" in nothing
    assert "**RALEARN** (exploratory) is better than standard attention" in better
    assert "**RALEARN** (exploratory) is worse than standard attention" in worse
    assert all(
        "B, RAEARLY, RALATE and RAALL are control arms (A/A)" in text for text in (nothing, better, worse)
    )


def test_excluded_runs_are_named_and_never_averaged(tmp_path: Path) -> None:
    def fail(value: dict[str, Any]) -> None:
        value |= {"status": "failed", "error": "NotFiniteError: loss nan"}
        value["validation"]["loss"] = 99.0

    def interrupt(value: dict[str, Any]) -> None:
        value["status"] = "interrupted"
        value["validation"]["loss"] = 99.0

    def another(value: dict[str, Any]) -> None:
        value["fingerprint"]["data"] = "other"
        value["validation"]["loss"] = 99.0

    study = a_study(tmp_path, change={"B0": fail, "RAALL1": interrupt, "RALATE2": another})
    (study / "runs" / "RAEARLY0" / "run.json").write_text("{")
    records.write(study / "runs" / "RAEARLY1" / "run.json", {"schema": 9})
    shutil.rmtree(study / "runs" / "RAEARLY2")
    report = build.build_report(study)
    assert {run.name: run.status for run in report.runs if not run.used} == {
        "B0": "failed", "RAALL1": "interrupted", "RALATE2": "finished",
        "RAEARLY0": "unreadable", "RAEARLY1": "unreadable", "RAEARLY2": "missing",
    }  # fmt: skip
    assert [r.variant for r in report.rows] == ["B", "RALATE", "RAALL", "RALEARN"]
    assert max(r.final_loss.mean for r in report.rows) < 5
    text = rendered.markdown(report)
    for message in ("NotFiniteError", "fingerprint differs in data", "is of schema 9", "it has not been run"):
        assert message in text
    assert "| RAEARLY2 | pending | no: it has not been run |" in text
    (line,) = [line for line in summary.context(report) if "not counted" in line]
    assert "4 of 15" in line
    assert "B0 (diverged)" in line
    assert "RALATE2 (not comparable)" in line


def test_hellaswag_near_chance_is_noted_and_a_missing_score_is_no_number(tmp_path: Path) -> None:
    def near(value: dict[str, Any]) -> None:
        value["hellaswag"] |= {"acc": 0.255, "acc_norm": 0.27}

    def absent(value: dict[str, Any]) -> None:
        value["hellaswag"] = {"absent": "no network"}

    change = {f"B{seed}": near for seed in range(3)} | {f"RAALL{seed}": absent for seed in range(3)}
    report = build.build_report(a_study(tmp_path, change=change))
    text = rendered.markdown(report)
    assert "Within two standard errors of chance, so no sign of skill: B." in text
    assert "RAALL not run: no network." in text
    assert row(report, "RAALL").hellaswag.acc is None


def test_uneven_step_times_of_many_runs_are_one_note_at_the_end(tmp_path: Path) -> None:
    def uneven(value: dict[str, Any]) -> None:
        value["notes"] = ["uneven step times: 10 % of the steps took 0.2 s", "another note"]

    report = build.build_report(a_study(tmp_path, change={"B0": uneven, "RAALL2": uneven}))
    (note,) = [note for note in report.notes if "step times" in note]
    assert note.endswith("B0, RAALL2")
    assert rendered.terminal(report).count("step times") == 1
    assert "RAALL2: another note" in report.notes


def test_a_truncated_schedule_is_flagged(tmp_path: Path) -> None:
    def cut(value: dict[str, Any]) -> None:
        value["schedule"]["cut"] = True

    page = rendered.markdown(build.build_report(a_study(tmp_path, change={"RAALL1": cut})))
    assert any(line.startswith("| RAALL") and line.endswith("| 1 of 3 |") for line in page.splitlines())


def test_markup_in_strings_of_records_is_escaped(tmp_path: Path) -> None:
    def hostile(value: dict[str, Any]) -> None:
        value |= {"status": "failed", "error": "<script>alert(1)</script> | [x](http://y) \n# heading"}

    text = rendered.markdown(build.build_report(a_study(tmp_path, change={"B0": hostile})))
    assert "<script>" not in text
    assert "[x](" not in text
    assert "\n# heading" not in text


def test_report_json_has_the_losses_of_each_run(tmp_path: Path) -> None:
    study = a_study(tmp_path, seeds=2)
    (study / "runs" / "B1" / "run.json").unlink()
    report = write.write_report(study)
    runs = {run["name"]: run for run in json.loads((study / "report.json").read_text())["runs"]}
    for run in report.used:
        history = run.record.validation.history
        assert runs[run.name]["losses"] == [[row.tokens, row.loss] for row in history]
        assert runs[run.name]["losses"][-1][1] == run.record.validation.loss
    assert runs["B1"]["losses"] == []


def cut_short(value: dict[str, Any]) -> None:
    """As the training clock leaves it: fewer tokens, a much higher loss, no last evaluation on the grid."""
    value["schedule"]["cut"] = True
    value["progress"] |= {"iterations": STEPS // 2, "tokens": STEPS // 2 * UPDATE, "train_seconds": 66.0}
    value["clock"]["train"] = 66.0
    value["throughput"] = None
    value["validation"]["loss"] += 2.0
    value["validation"]["history"] = [
        value["validation"]["history"][0],
        [STEPS // 2 * UPDATE, 66.0, value["validation"]["loss"]],
    ]


def test_a_truncated_run_counts_in_no_difference_noise_floor_or_verdict(tmp_path: Path) -> None:
    sound = build.build_report(a_study(tmp_path / "sound", seeds=4, effect=0.05))
    cut = build.build_report(
        a_study(tmp_path / "cut", seeds=4, effect=0.05, change={"RAALL1": cut_short, "RALEARN2": cut_short})
    )
    assert cut.cut == ["RAALL1", "RALEARN2"]
    assert cut.floor is not None
    assert sound.floor is not None
    assert cut.floor.dof == sound.floor.dof - 1
    assert cut.floor.sigma == pytest.approx(sound.floor.sigma, rel=0.3)
    assert cut.verdicts[0].test.difference.count == 3
    assert cut.verdicts[0].test.difference.mean == pytest.approx(0.05, abs=0.02)
    assert row(cut, "RAALL").against_controls.count == 3
    for name in ("RAALL", "RALEARN"):
        final, best = row(cut, name).final_loss, row(cut, name).best_loss
        assert (final.count, best.count) == (3, 3)
        assert final.mean < 5
        assert row(cut, name).tokens == row(cut, "B").tokens
        assert row(cut, name).seeds == [0, 1, 2, 3]
        assert f"{sentences.shown(final)} (3 of 4 seeds)" in rendered.markdown(cut)
        assert any(line.startswith(name) and "3 of 4" in line for line in rendered.terminal(cut).splitlines())
    assert "the variants have different seeds" in rendered.markdown(cut)
    assert "the variants have different seeds" not in rendered.markdown(sound)
    assert {run.name for run in build.ended_runs(cut)} == {run.name for run in cut.runs} - {*cut.cut}
    assert "cut 2 of 20 runs short (RAALL1, RALEARN2)" in rendered.markdown(cut)


def test_runs_truncated_at_different_points_have_no_verdict_and_at_one_point_they_have(
    tmp_path: Path,
) -> None:
    names = [run_record.run_name(name, seed) for name in VARIANTS for seed in range(3)]

    def cut_anywhere(value: dict[str, Any]) -> None:
        cut_short(value)
        iterations = STEPS // 2 + names.index(value["run"])
        value["progress"] |= {"iterations": iterations, "tokens": iterations * UPDATE}
        value["validation"]["history"][-1][0] = iterations * UPDATE

    report = build.build_report(a_study(tmp_path / "apart", change=dict.fromkeys(names, cut_anywhere)))
    assert report.floor is None
    assert report.verdicts == []
    output = "**RALEARN**: cannot tell: no seed of it has a control arm that ended its schedule"
    assert output in rendered.markdown(report)
    assert {made_row.final_loss for made_row in report.rows} == {None}
    assert {run.name for run in build.ended_runs(report)} == {*names}
    alike = build.build_report(a_study(tmp_path / "alike", change=dict.fromkeys(names, cut_short)))
    assert alike.cut == []
    assert alike.floor is not None
    assert len(alike.verdicts) == 1
