"""Reports of studies with tuned learning rates, from synthetic records."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from runtime import run_record
from runtime.errors import UserError
from study import plan_file
from study.compare.loaded_studies import read_studies
from study.compare.study_checklist import checklist
from study.plan_file import LearningRates
from study.report.report_data import build_report
from study.runs import EXPECTED, Expected, ExpectedRun, read_runs
from study.study_settings import judged_runs, tuning_runs
from study.tuned_rates import choose_rates
from tests.checked_files import write_checked
from tests.study.sample_records import a_design, a_plan, a_record, edit

ARMS = ("B", "RAALL", "RALEARN")
RATES = ("1e-3", "2e-3")
SEEDS = 4


def noise(name: str, seed: int) -> float:
    return 0.002 * ((7 * seed + 3 * len(name) + 5 * ord(name[-1])) % 5 - 2)


class Tuned:
    """A study with two rates. losses: (arm, rate) -> loss; differences between seeds are small."""

    def __init__(
        self, folder: Path, losses: Mapping[tuple[str, str], float], chosen: Mapping[str, str]
    ) -> None:
        self.folder = folder
        self.rates = LearningRates(RATES, 2, dict(chosen))
        self.runs = tuning_runs(ARMS, self.rates) + judged_runs(ARMS, SEEDS, self.rates)
        for name, seed in self.runs:
            arm, _, rate = name.partition("+LR=")
            self.write(name, seed, losses[arm, rate] + noise(name, seed))
        rows = {name: row for name, row in a_plan()["variants"].items() if name in ARMS}
        plan = a_plan(variants=rows, learning_rates=self.rates.to_json(), **a_design([SEEDS]))
        write_checked(folder / "plan.json", plan)
        expected = Expected(ARMS, SEEDS, tuple(ExpectedRun(*run) for run in self.runs))
        write_checked(folder / EXPECTED, expected.to_json())

    def write(self, name: str, seed: int, loss: float) -> None:
        record = a_record(name, seed, loss)
        folder = self.folder / "runs" / record["run"]
        folder.mkdir(parents=True, exist_ok=True)
        write_checked(folder / "run.json", record)

    def report(self) -> Any:
        return build_report(self.folder)


def table(best: str = "2e-3", effect: float = -0.1, same: float = -0.1, common: float = 0.1) -> Any:
    """Losses of arms whose best rates are 1e-3 for the control arms and `best` for RALEARN.

    effect, same, common: of RALEARN at its rate against the control arms at theirs and at its rate, and at 1e-3.
    """
    controls = {"1e-3": 4.0, "2e-3": 4.0 + effect - same}
    losses = {(name, rate): loss for name in ("B", "RAALL") for rate, loss in controls.items()}
    at_best = (
        {"1e-3": 4.0 + common, "2e-3": 4.0 + effect}
        if best == "2e-3"
        else {"1e-3": 4.0 + effect, "2e-3": 5.0}
    )
    return losses | {("RALEARN", rate): loss for rate, loss in at_best.items()}


CHOSEN = {"B": "1e-3", "RAALL": "1e-3", "RALEARN": "2e-3"}


def test_the_verdict_is_of_each_arm_at_its_best_rate_and_tuning_seeds_are_not_judged(tmp_path: Path) -> None:
    study = Tuned(tmp_path, table(), CHOSEN)
    report = study.report()
    assert report.variants == ["B", "RAALL", "RALEARN"]
    assert {run.seed for run in report.runs} == set(range(SEEDS))
    assert len(report.runs) == len(report.used) == 3 * SEEDS
    (verdict,) = report.verdicts
    assert (verdict.variant, verdict.word) == ("RALEARN", "better")
    assert (verdict.seeds, verdict.finished) == (SEEDS, SEEDS)
    assert verdict.test.difference.mean == pytest.approx(-0.1, abs=0.01)
    (one,) = report.rates.common
    assert (one.word, one.test.difference.mean) == ("worse", pytest.approx(0.1, abs=0.01))
    assert report.rates.unconfirmed == {}
    assert {run.seed for run in report.rates.tuning} == {1000, 1001}
    # control arms at the rate of RALEARN, and RALEARN at the rate of the control arms
    assert {(run.arm, run.rate) for run in report.rates.others} == {
        ("B", "2e-3"), ("RAALL", "2e-3"), ("RALEARN", "1e-3"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("losses", "word"),
    [(table(effect=-0.1, same=0.0), "better"), (table(effect=0.1, same=0.0, common=0.0), "worse")],
)
def test_a_difference_that_the_rates_alone_explain_is_no_verdict(
    tmp_path: Path, losses: Any, word: str
) -> None:
    report = Tuned(tmp_path, losses, CHOSEN).report()
    (verdict,) = report.verdicts
    assert verdict.word == "cannot tell"
    assert report.rates.unconfirmed == {"RALEARN": word}


def test_with_one_best_rate_the_verdicts_are_the_same(tmp_path: Path) -> None:
    report = Tuned(tmp_path, table(best="1e-3"), dict.fromkeys(ARMS, "1e-3")).report()
    assert report.verdicts == report.rates.common == report.rates.same
    assert report.rates.others == []


def test_the_verdict_waits_for_every_run_that_it_needs(tmp_path: Path) -> None:
    study = Tuned(tmp_path, table(), CHOSEN)
    edit(study.folder, "B+LR=2e-3.2", status="interrupted")
    report = study.report()
    (verdict,) = report.verdicts
    assert (verdict.word, verdict.finished) == ("interim", SEEDS - 1)


def test_before_the_choice_no_run_is_judged(tmp_path: Path) -> None:
    study = Tuned(tmp_path, table(), {})
    report = study.report()
    assert report.runs == report.verdicts == []


def test_a_damaged_plan_judges_no_tuning_run(tmp_path: Path) -> None:
    study = Tuned(tmp_path, table(), CHOSEN)
    (study.folder / "plan.json").write_text("{")
    report = study.report()
    assert report.runs == report.verdicts == []
    assert report.damaged


def chosen(study: Tuned) -> Mapping[str, str]:
    plan = plan_file.read(study.folder)
    assert plan
    rates = choose_rates(study.folder, plan, ARMS).learning_rates
    assert rates
    return rates.chosen


def test_the_choice_follows_from_the_records(tmp_path: Path) -> None:
    assert chosen(Tuned(tmp_path, table(), {})) == CHOSEN


def test_a_diverged_tuning_run_makes_its_rate_ineligible(tmp_path: Path) -> None:
    study = Tuned(tmp_path, table(), {})
    name = "RALEARN+LR=2e-3.1001"
    folder = study.folder / "runs" / name
    failed = run_record.blank(name, "RALEARN+LR=2e-3", 1001).to_json()
    write_checked(folder / "run.json", failed | {"status": "failed", "error": "NotFiniteError: loss nan"})
    assert chosen(study) == CHOSEN | {"RALEARN": "1e-3"}
    (row,) = [arm for arm in study.report().rates.arms if arm.arm == "RALEARN"]
    assert row.means["2e-3"] is None


def test_another_failure_of_a_tuning_run_defers_the_choice(tmp_path: Path) -> None:
    study = Tuned(tmp_path, table(), {})
    edit(study.folder, "RALEARN+LR=2e-3.1001", status="failed", error="killed by signal 9")
    with pytest.raises(UserError, match=r"RALEARN\+LR=2e-3.1001 does not count"):
        chosen(study)


def test_an_altered_tuning_run_is_no_silent_choice(tmp_path: Path) -> None:
    study = Tuned(tmp_path, table(), {})
    path = study.folder / "runs" / "B+LR=1e-3.1000" / "run.json"
    write_checked(path, json.loads(path.read_text()))
    path.write_text(path.read_text().replace('"loss": ', '"loss": 1', 1))
    with pytest.raises(UserError, match=r"B\+LR=1e-3.1000 does not count"):
        chosen(study)
    path.unlink()
    with pytest.raises(UserError, match=r"B\+LR=1e-3.1000 does not count"):
        chosen(study)


def test_a_lost_choice_is_restored_and_another_one_is_refused(tmp_path: Path) -> None:
    study = Tuned(tmp_path, table(), CHOSEN)
    plan = plan_file.read(study.folder)
    assert plan
    lost = LearningRates(RATES, 2)
    write_checked(study.folder / "plan.json", plan.to_json() | {"learning_rates": lost.to_json()})
    assert chosen(study) == CHOSEN
    for seed in (1000, 1001):
        study.write("B+LR=1e-3", seed, 9.0)
    with pytest.raises(UserError, match="lost the chosen learning rates"):
        chosen(study)


def test_missing_judged_runs_are_pending_under_their_arm(tmp_path: Path) -> None:
    study = Tuned(tmp_path, table(), CHOSEN)
    for name in ("RALEARN+LR=2e-3.3", "RALEARN+LR=1e-3.3"):
        shutil.rmtree(study.folder / "runs" / name)
    assert [run.status for run in read_runs(study.folder)].count("missing") == 2
    report = study.report()
    assert [(run.variant, run.seed) for run in report.runs if run.status == "missing"] == [("RALEARN", 3)]
    assert report.rates.pending == ["RALEARN+LR=1e-3.3"]


def test_studies_that_chose_other_rates_are_not_compared(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one", "same", "other")]
    for path, rate in zip(paths, ("2e-3", "2e-3", "1e-3"), strict=True):
        Tuned(path, table(best=rate), CHOSEN | {"RALEARN": rate})
    found = []
    for path in paths[1:]:
        rows = {check.subject: check for check in checklist(read_studies([paths[0], path]))}
        found.append(rows["tuned learning rate"])
    assert [check.blocks for check in found] == [False, True]
    assert found[1].values == ("RALEARN 2e-3", "RALEARN 1e-3")
