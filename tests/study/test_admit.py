"""A study refuses a variant that fails a check."""

import dataclasses
from pathlib import Path

import pytest

from ra import arms
from ra.admission import process
from ra.admission.results import CHECKS, Examination, Outcome, Violation
from runtime import run_record
from runtime.errors import UserError
from runtime.run_record import Admission, ModelFault
from study import admit
from study.report.report_data import build_report
from study.runs import read_runs
from tests.small_runs import configuration
from tests.study.sample_records import a_study

LEAK = Violation("LEAKY", "causal", "it leaks", "mask it", 3, 7, 0.5, "ra/custom/leaky.py", 4)


def examination(*violations: Violation) -> Examination:
    return Examination("LEAKY", tuple(Outcome(check, "passed", 0.0) for check in CHECKS), violations)


def test_a_refusal_is_one_line_with_check_layer_source_and_fix() -> None:
    other = LEAK.replace(check="mode")
    with pytest.raises(UserError) as caught:
        admit.require_admitted({"LEAKY": examination(LEAK, LEAK, other)})
    text = str(caught.value)
    assert "\n" not in text
    for part in ("causal", "layer 3", "ra/custom/leaky.py:4", "fix: mask it", "1 more"):
        assert part in text
    admit.require_admitted({"LEAKY": examination()})


@pytest.mark.parametrize("arm", ["LEAKY", "B+MLP=leaky", "LEAKY+AQN=mild", "RALEARN+WIDTH=match:LEAKY"])
def test_a_changed_file_is_examined_again_in_every_arm_that_uses_it(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, arm: str
) -> None:
    monkeypatch.setattr(arms, "CUSTOM_FOLDER", tmp_path)
    config = configuration(texts, 4)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, directory=tmp_path / "data"))
    asked: list[list[str]] = []

    def examined(variants: list[str], *arguments: object) -> dict[str, Examination]:
        asked.append(variants)
        return {name: examination(LEAK).replace(variant=name) for name in variants}

    monkeypatch.setattr(admit, "examine_variants", examined)
    for text in ("x = 1\n", "x = 1\n", "x = 2\n"):
        (tmp_path / "leaky.py").write_text(text)
        found = admit.examine_cached(["B", arm], config, autocast=False)
        assert found[arm].violations[0].message == "it leaks"
    admit.examine_cached(["B"], config, autocast=True)
    assert asked == [["B", arm], [arm], ["B"]]


def test_a_crash_is_not_saved(tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration(texts, 4)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, directory=tmp_path / "data"))
    died = process._died("B", "causal", "it gave no result", "")
    monkeypatch.setattr(admit, "examine_variants", lambda *arguments: {"B": died})
    assert admit.examine_cached(["B"], config, False)["B"].violations
    assert not list((tmp_path / "data").glob(".admission-*"))


def test_a_trained_model_that_leaks_does_not_count(tmp_path: Path) -> None:
    study = a_study(tmp_path / "one", effect=-0.5)
    folder = study / "runs" / "RALEARN1"
    found = Admission((ModelFault("causal", "it sees the future", 0.5),), 0.1)
    run_record.write(folder, run_record.load(folder).replace(admission=found))
    run = next(run for run in read_runs(study) if run.name == "RALEARN1")
    assert not run.used
    assert run.cause == "not admitted"
    assert "fails the check causal: it sees the future" in run.why_not
    assert [verdict.seeds for verdict in build_report(study).verdicts] == [2]
