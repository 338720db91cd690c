"""The page of several sizes: built from records alone, its words, its figure, and a missing size."""

import json
import math
from pathlib import Path

import pytest

from gpt2.artifacts.run_record import run_name
from gpt2.system.errors import UserError
from pages.document import render_terminal
from scripts import report as report_command
from study.analysis.trend import CANNOT_TELL, HOLDS, SHRINKS
from study.report.build import build_report
from study.sizes.build import build_sizes, read_sizes, study_folder
from study.sizes.page import effects_figure, sizes_document
from study.sizes.write import write_sizes
from tests.study.sample_records import a_study, edit
from tests.study.sweep.test_tuned_report import CHOSEN, Tuned, table

PARAMETERS = {"tiny": 150_000, "mini": 900_000, "small": 10_900_000}


def several(folder: Path, effects: dict[str, float], seeds: int = 5) -> Path:
    """Studies of sizes in which RALEARN differs by these effects (nats). Returns the folder of the page."""
    directory = folder / "s"
    for size, effect in effects.items():
        study = a_study(
            study_folder(directory, size), seeds, effect, ("B", "RAALL", "RALEARN"), hellaswag=False
        )
        for run in (study / "runs").iterdir():
            edit(study, run.name, parameters=PARAMETERS[size])
    return directory


def test_the_effects_are_the_verdicts_of_the_reports_and_hold(tmp_path: Path) -> None:
    directory = several(tmp_path, {"tiny": -0.05, "mini": -0.05, "small": -0.05})
    found = build_sizes(directory, ("tiny", "mini", "small"))
    (trend,) = found.trends
    assert (trend.arm, trend.word, found.problems) == ("RALEARN", HOLDS, [])
    for size, effect in zip(PARAMETERS, trend.effects, strict=True):
        assert effect == build_report(study_folder(directory, size)).verdicts[0]
    tokens = 300 * 512 * 1024
    assert [(row.parameters, row.tokens, row.flops) for row in found.rows] == [
        (count, tokens, 6.0 * count * tokens) for count in PARAMETERS.values()
    ]
    figure = effects_figure(found)
    assert figure
    (drawn,) = figure["data"]
    assert drawn["x"] == list(PARAMETERS.values())
    assert drawn["y"] == [
        pytest.approx(100 * math.expm1(one.test.difference.mean)) for one in trend.effects if one
    ]
    assert figure["layout"]["xaxis"]["type"] == "log"


def test_an_effect_that_goes_to_zero_shrinks(tmp_path: Path) -> None:
    directory = several(tmp_path, {"tiny": -0.08, "mini": -0.04, "small": 0.0})
    text = " ".join(write_sizes(directory, ("tiny", "mini", "small")).split())
    assert build_sizes(directory, ("tiny", "mini", "small")).trends[0].word == SHRINKS
    assert "shrinks. Better at tiny, better at mini" in text
    assert "per tenfold parameters" in text
    for name in ("sizes.html", "sizes.md", "sizes.json"):
        assert (directory / name).exists()
    value = json.loads((directory / "sizes.json").read_text())
    assert value["trends"][0]["word"] == SHRINKS
    assert value["rows"][2]["flops"] == pytest.approx(6 * PARAMETERS["small"] * 300 * 512 * 1024)


def test_the_terminal_fits_100_columns_and_the_rule_is_two_sentences(tmp_path: Path) -> None:
    directory = several(tmp_path, {"tiny": -0.05, "mini": -0.05})
    text = render_terminal(sizes_document(build_sizes(directory, ("tiny", "mini"))))
    assert max(map(len, text.splitlines())) <= 100
    assert "An effect shrinks or grows if" in text


def test_a_size_without_runs_or_with_few_seeds_gives_no_trend_and_is_named(tmp_path: Path) -> None:
    directory = several(tmp_path, {"tiny": -0.05})
    found = build_sizes(directory, ("tiny", "mini"))
    assert (found.trends[0].word, found.problems) == (
        CANNOT_TELL,
        ["s-mini has no judged run yet; `make` runs it."],
    )
    several(tmp_path, {"mini": -0.05}, seeds=2)
    found = build_sizes(directory, ("tiny", "mini"))
    assert (found.trends[0].word, found.trends[0].contrast) == (CANNOT_TELL, None)
    edit(study_folder(directory, "mini"), "B0", status="failed", error="x")
    (problem,) = build_sizes(directory, ("tiny", "mini")).problems
    assert problem == "s-mini: 5 of 6 runs are finished; `make` continues."
    empty = build_sizes(tmp_path / "absent", ("tiny", "mini"))
    assert (empty.trends, effects_figure(empty)) == ([], None)
    assert "no effect to show" in render_terminal(sizes_document(empty))


def test_sizes_of_other_text_are_not_compared(tmp_path: Path) -> None:
    directory = several(tmp_path, {"tiny": -0.05, "mini": -0.05})
    study = study_folder(directory, "mini")
    for run in (study / "runs").iterdir():
        edit(study, run.name, fingerprint={"data": "f" * 64})
    found = build_sizes(directory, ("tiny", "mini"))
    assert found.trends == []
    assert "differ in data, so their effects are not compared; fix: " in found.problems[0]


def test_tuned_studies_give_the_effects_at_the_best_rates(tmp_path: Path) -> None:
    directory = tmp_path / "s"
    for size, effect in (("tiny", -0.1), ("mini", -0.04)):
        tuned = Tuned(study_folder(directory, size), table(effect=effect, same=effect), CHOSEN)
        for name, seed in tuned.runs:
            edit(tuned.folder, run_name(name, seed), parameters=PARAMETERS[size])
    found = build_sizes(directory, ("tiny", "mini"))
    (trend,) = found.trends
    assert (trend.arm, trend.role, trend.word, found.problems) == ("RALEARN", "exploratory", SHRINKS, [])
    assert [one.test.difference.mean for one in trend.effects if one] == [
        pytest.approx(-0.1, abs=0.01), pytest.approx(-0.04, abs=0.01),
    ]  # fmt: skip
    assert [row.counted for row in found.rows] == [12, 12]


def test_make_report_rebuilds_the_page_of_the_named_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = several(tmp_path, {"tiny": -0.05, "mini": -0.05})
    write_sizes(directory, ("tiny", "mini"))
    (directory / "sizes.html").unlink()
    monkeypatch.setattr("sys.argv", ["scripts.report", str(directory)])
    assert report_command.main() == 0
    assert (directory / "sizes.html").exists()
    assert (study_folder(directory, "tiny") / "report.html").exists()
    assert "holds" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"a study of the sizes tiny, mini; fix: make verify STUDY=.*s-tiny"):
        report_command.study_directory("verify")
    assert read_sizes(tmp_path) == ()


@pytest.mark.parametrize("content", ["{", "[]", '{"rows": [{"size": "huge"}]}', '{"rows": 3}'])
def test_a_damaged_list_of_sizes_is_one_line_that_names_the_fix(tmp_path: Path, content: str) -> None:
    (tmp_path / "sizes.json").write_text(content)
    with pytest.raises(UserError, match=r"is damaged .*fix: run `make`") as caught:
        read_sizes(tmp_path)
    assert "\n" not in str(caught.value)
