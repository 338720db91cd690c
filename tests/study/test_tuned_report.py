"""Reports of studies with tuned learning rates, from synthetic records."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ra.arms import control_arms, parse_arm
from referee.verdict.design import MARGIN, Design
from runtime.records import to_plain
from study.report.report_data import Report, build_report
from study.runs import EXPECTED, Expected
from study.tuned_rates import FILE, FOLDER, Choice, Tuned, at_rate, judged_names
from tests.checked_files import write_checked
from tests.study.report import rendered
from tests.study.sample_records import a_plan, a_record, edit

ARMS = ("B", "RAALL", "RALEARN")
RATES = ("1e-3", "2e-3")
SEEDS = 4


def noise(name: str, seed: int) -> float:
    return 0.002 * ((7 * seed + 3 * len(name) + 5 * ord(name[-1])) % 5 - 2)


def a_tuned_plan(names: list[str], chosen: Mapping[str, str], seeds: int) -> dict[str, Any]:
    """The rows and the design of a study that judges arms at chosen rates, as entries of plan.json."""
    at_best = [at_rate(name, rate) for name, rate in chosen.items()]
    controls = control_arms(at_best)
    arms = tuple(name for name in at_best if name not in controls)
    looks, choice = (tuple(range(seeds)), (seeds,)), f"{FOLDER}/{FILE}"
    design = Design(tuple(controls), arms, arms[0], *looks, MARGIN, choice=choice).hashed
    rows = {name: a_plan()["variants"][parse_arm(name).attention] for name in names}
    return {"variants": rows, "design": to_plain(design)}


class TunedStudy:
    """A study with two rates. losses: (arm, rate) -> loss; differences between seeds are small."""

    def __init__(
        self, folder: Path, losses: Mapping[tuple[str, str], float], chosen: Mapping[str, str]
    ) -> None:
        self.folder, self.names = folder, judged_names(ARMS, chosen)
        for name in self.names:
            arm, _, rate = name.partition("+LR=")
            for seed in range(SEEDS):
                record = a_record(name, seed, losses[arm, rate] + noise(name, seed))
                (folder / "runs" / record["run"]).mkdir(parents=True)
                write_checked(folder / "runs" / record["run"] / "run.json", record)
        write_checked(folder / "plan.json", a_plan(**a_tuned_plan(self.names, chosen, SEEDS)))
        write_checked(folder / EXPECTED, Expected(tuple(self.names), SEEDS).to_json())
        tuned = {
            name: Tuned(rate, {rate: losses[name, rate] for rate in RATES}) for name, rate in chosen.items()
        }
        (folder / FOLDER).mkdir()
        write_checked(folder / FOLDER / FILE, Choice(RATES, (1000, 1001), tuned).to_json())

    def report(self) -> Report:
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
JUDGED = "RALEARN+LR=2e-3"


def test_the_verdict_is_of_each_arm_at_its_best_rate(tmp_path: Path) -> None:
    report = TunedStudy(tmp_path, table(), CHOSEN).report()
    (verdict,) = report.verdicts
    assert (verdict.variant, verdict.word, verdict.role) == (JUDGED, "better", "primary")
    assert (verdict.seeds, verdict.finished) == (SEEDS, SEEDS)
    assert verdict.test.difference.mean == pytest.approx(-0.1, abs=0.01)
    assert report.tuned
    (one,) = report.tuned.common
    assert (one.word, one.test.difference.mean) == ("worse", pytest.approx(0.1, abs=0.01))
    assert report.tuned.unconfirmed == {}
    (row,) = (row.against_controls for row in report.rows if row.variant == JUDGED)
    assert row
    assert row.mean == verdict.test.difference.mean  # the table and the verdict agree
    text = " ".join(rendered.markdown(report).split())
    assert "1e-3 for B, RAALL; 2e-3 for RALEARN" in text
    assert "| RALEARN | 4.1000 | **3.9000** | 2e-3 |" in text


@pytest.mark.parametrize(
    ("losses", "word"),
    [(table(effect=-0.1, same=0.0), "better"), (table(effect=0.1, same=0.0, common=0.0), "worse")],
)
def test_a_difference_that_the_rates_alone_explain_is_no_verdict(
    tmp_path: Path, losses: Any, word: str
) -> None:
    report = TunedStudy(tmp_path, losses, CHOSEN).report()
    (verdict,) = report.verdicts
    assert verdict.word == "cannot tell"
    assert report.tuned
    assert report.tuned.unconfirmed == {JUDGED: word}
    assert f"it is {word} at its best rate" in " ".join(rendered.markdown(report).split())


def test_with_one_best_rate_the_verdicts_are_the_same(tmp_path: Path) -> None:
    report = TunedStudy(tmp_path, table(best="1e-3"), dict.fromkeys(ARMS, "1e-3")).report()
    assert report.tuned
    assert report.verdicts == report.tuned.common == report.tuned.same


@pytest.mark.parametrize("run", ["B+LR=2e-3.2", "RAALL+LR=1e-3.2", "RALEARN+LR=1e-3.2", "RALEARN+LR=2e-3.2"])
def test_the_verdict_waits_for_every_run_that_it_needs(tmp_path: Path, run: str) -> None:
    study = TunedStudy(tmp_path, table(), CHOSEN)
    edit(study.folder, run, status="interrupted")
    (verdict,) = study.report().verdicts
    assert (verdict.word, verdict.finished) == ("interim", SEEDS - 1)


def test_a_missing_or_damaged_choice_changes_no_verdict(tmp_path: Path) -> None:
    study = TunedStudy(tmp_path, table(), CHOSEN)
    expected = study.report().verdicts
    (study.folder / FOLDER / FILE).write_text("{")
    report = study.report()
    assert report.verdicts == expected
    assert "choice.json" in report.damaged[0]
    shutil.rmtree(study.folder / FOLDER)
    assert study.report().verdicts == expected
