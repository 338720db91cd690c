"""A study refuses a variant that fails a check; an ignored check marks every result."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from gpt2.artifacts import run_record
from gpt2.artifacts.run_record import Admission, ModelFault
from gpt2.config.dotconfig import ConfigError
from gpt2.system.errors import UserError
from pages.document import render_markdown, render_terminal
from pages.page import render_html
from ra import names
from ra.admission import process
from ra.admission.results import CHECKS, Examination, Outcome
from ra.admission.violation import Violation
from ra.settings import AlternationSettings
from study.admission import admit, ignore
from study.admission.marks import marked_names, with_marks
from study.compare.build import build_comparison
from study.compare.sections import comparison_document
from study.records.runs import read_runs
from study.report.build import as_json, build_report
from study.report.document import report_document, terminal_document
from tests.small_runs import configuration
from tests.study.sample_records import a_study

ALTERNATION = AlternationSettings("output", 0.5, 100.0)
LEAK = Violation("LEAKY", "causal", "it leaks", "mask it", 3, 7, 0.5, "ra/custom/leaky.py", 4)


def examination(*violations: Violation) -> Examination:
    return Examination("LEAKY", tuple(Outcome(check, "passed", 0.0) for check in CHECKS), violations)


def test_a_refusal_is_one_line_with_check_layer_source_and_fix() -> None:
    other = dataclasses.replace(LEAK, check="mode")
    with pytest.raises(UserError) as caught:
        admit.ignored_failures({"LEAKY": examination(LEAK, LEAK, other)}, {})
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(
        "LEAKY fails the check causal: layer 3: it leaks (ra/custom/leaky.py:4); fix: mask it"
    )
    assert "1 more failed checks" in text
    assert text.endswith('CONFIG_ADMISSION_IGNORE="LEAKY:causal LEAKY:mode"')


def test_ignored_checks_are_accepted_and_others_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"LEAKY": examination(LEAK)}
    assert admit.ignored_failures(found, {"LEAKY": ("causal", "mode")}) == {"LEAKY": ("causal",)}
    assert "LEAKY passes that check" in capsys.readouterr().out
    with pytest.raises(UserError, match="LEAKY fails the check causal"):
        admit.ignored_failures(found, {"LEAKY": ("mode",)})
    assert admit.ignored_failures({"LEAKY": examination()}, {}) == {}


class FakeSymbols(dict[str, str]):
    def text(self, name: str, absent: str | None = None) -> str:
        return self[name] if absent is None else self.get(name, absent)

    def error(self, name: str, problem: str) -> ConfigError:
        return ConfigError(f"CONFIG_{name} {problem}")


def test_the_symbol_is_read_strictly() -> None:
    def read(text: str) -> dict[str, tuple[str, ...]]:
        return ignore.ignored_checks(FakeSymbols(ADMISSION_IGNORE=text), ("B", "LEAKY", "RA:1-2"))  # type: ignore[arg-type]

    assert read("") == {}
    assert read("LEAKY:causal LEAKY:mode RA:1-2:batch") == {"LEAKY": ("causal", "mode"), "RA:1-2": ("batch",)}
    for text, says in (
        ("LEAKY", "malformed"),
        ("MINE:causal", "not in CONFIG_VARIANTS"),
        ("LEAKY:x", "unknown check x"),
    ):
        with pytest.raises(ConfigError, match=says):
            read(text)
    assert ignore.ignored_checks(FakeSymbols(), ("B",)) == {}  # type: ignore[arg-type]


def test_a_result_is_saved_until_the_source_changes(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "CUSTOM_FOLDER", tmp_path)
    config = configuration(texts, 4)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, directory=tmp_path / "data"))
    asked: list[list[str]] = []

    def examined(variants: list[str], *arguments: object) -> dict[str, Examination]:
        asked.append(variants)
        return {name: dataclasses.replace(examination(LEAK), variant=name) for name in variants}

    monkeypatch.setattr(admit, "examine_variants", examined)
    (tmp_path / "leaky.py").write_text("x = 1\n")
    for _ in range(2):
        found = admit.examine_cached(["B", "LEAKY"], config, ALTERNATION, autocast=False)
        assert found["LEAKY"].violations[0].message == "it leaks"
    (tmp_path / "leaky.py").write_text("x = 2\n")
    admit.examine_cached(["B", "LEAKY"], config, ALTERNATION, autocast=False)
    admit.examine_cached(["B"], config, ALTERNATION, autocast=True)
    assert asked == [["B", "LEAKY"], ["LEAKY"], ["B"]]


@pytest.mark.parametrize("arm", ["B+MLP=leaky", "LEAKY+AQN=mild", "RALEARN+WIDTH=match:LEAKY"])
def test_a_changed_file_is_examined_again_in_every_arm_that_uses_it(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, arm: str
) -> None:
    monkeypatch.setattr(names, "CUSTOM_FOLDER", tmp_path)
    config = configuration(texts, 4)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, directory=tmp_path / "data"))
    asked: list[list[str]] = []

    def examined(variants: list[str], *arguments: object) -> dict[str, Examination]:
        asked.append(variants)
        return {name: dataclasses.replace(examination(), variant=name) for name in variants}

    monkeypatch.setattr(admit, "examine_variants", examined)
    for text in ("x = 1\n", "x = 1\n", "x = 2\n"):
        (tmp_path / "leaky.py").write_text(text)
        admit.examine_cached(["B", arm], config, ALTERNATION, autocast=False)
    assert asked == [["B", arm], [arm]]


def test_a_crash_is_not_saved(tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration(texts, 4)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, directory=tmp_path / "data"))
    died = process._died("B", "causal", "it gave no result", "")
    monkeypatch.setattr(admit, "examine_variants", lambda *arguments: {"B": died})
    assert admit.examine_cached(["B"], config, ALTERNATION, False)["B"].violations
    assert not list((tmp_path / "data").glob(".admission-*"))


def test_a_mark_replaces_names_and_leaves_records() -> None:
    assert with_marks({"A": ["A", "AB", ("A", 1)]}, {"A": "A (fails mode)"}) == {
        "A (fails mode)": ["A (fails mode)", "AB", ("A (fails mode)", 1)]
    }


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return a_study(tmp_path / "one", effect=-0.5)


def with_admission(study: Path, ignored: tuple[str, ...], seeds: tuple[int, ...] = (0, 1, 2)) -> None:
    """Give RALEARN's trained models a leak."""
    for seed in seeds:
        folder = study / "runs" / f"RALEARN{seed}"
        found = Admission(ignored, (ModelFault("causal", "it sees the future", 0.5),), 0.1)
        run_record.write(folder, dataclasses.replace(run_record.load(folder), admission=found, seal=None))


def test_a_trained_model_that_leaks_does_not_count(study: Path) -> None:
    with_admission(study, (), seeds=(1,))
    run = next(run for run in read_runs(study) if run.name == "RALEARN1")
    assert not run.used
    assert run.cause == "not admitted"
    assert "fails the check causal: it sees the future" in run.why_not
    assert [verdict.seeds for verdict in build_report(study).verdicts] == [2]


def test_an_ignored_failure_is_in_every_table_figure_and_verdict(study: Path, tmp_path: Path) -> None:
    with_admission(study, ("causal",))
    assert marked_names([run.record for run in read_runs(study)]) == {"RALEARN": "RALEARN (fails causal)"}
    report = build_report(study)
    assert [verdict.variant for verdict in report.verdicts] == ["RALEARN (fails causal)"]
    assert "RALEARN (fails causal)" in report.variants
    document = report_document(report, study)
    other = a_study(tmp_path / "two", effect=-0.5)
    comparison = comparison_document(build_comparison([study, other]))
    for text in (
        render_markdown(document),
        render_terminal(terminal_document(report)),
        render_html(document),
        json.dumps(as_json(report)),
    ):
        unmarked = re.findall(r"(?<![A-Za-z:])RALEARN(?![0-9]| \(fails causal\))", text)
        assert len(unmarked) <= 3, unmarked  # the warning and the method name the variant itself
        assert "RALEARN (fails causal)" in text
    for text in (render_markdown(comparison), render_html(comparison), render_terminal(comparison)):
        assert "RALEARN (fails causal)" in text
        assert "CONFIG_ADMISSION_IGNORE lets RALEARN train" in " ".join(text.split())
