"""The verdicts of a study are one run of its group, with the numbers of the report."""

import json
from pathlib import Path

import pytest

from referee.verdict.statistics import perplexity_percent
from runtime import files
from runtime.settings import TrackingConfig
from study.report.report_data import as_json, build_report
from study.verdict_tracker import track_verdict, verdict_values
from tests.fake_trackers import install, observed
from tests.study.sample_records import a_study


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(tmp_path / "fakes", monkeypatch)
    return a_study(tmp_path / "week", seeds=1, variants=("B", "RALEARN"))


def test_the_verdict_is_a_run_of_the_group_with_the_numbers_of_the_report(
    tmp_path: Path, study: Path
) -> None:
    judged = a_study(tmp_path / "judged", seeds=3, effect=-0.5)
    files.write_json(judged / "report.json", as_json(build_report(judged)))
    (verdict,) = build_report(judged).verdicts
    interval = verdict.test.difference
    assert interval.low is not None
    assert interval.high is not None
    percents = map(perplexity_percent, (interval.mean, interval.low, interval.high))
    numbers = zip(("percent", "low", "high"), percents, strict=True)
    expected = {f"verdict/RALEARN/{key}": value for key, value in numbers} | {
        "verdict/RALEARN/word": "better",
        "verdict/RALEARN/p": verdict.adjusted_p,
        "verdict/RALEARN/seeds": 3,
    }
    assert verdict_values(judged) == expected
    track_verdict(judged, TrackingConfig(True, "online", "p"))
    calls = {call[0]: call[1] for call in observed()}
    about = calls["init"]
    assert (about["name"], about["group"], about["job_type"]) == ("verdict", "judged", "verdict")
    assert calls["summary"] == expected


def test_the_verdict_in_tensorboard_has_the_same_names(study: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report = {"verdicts": [{"variant": "B+WD=0.1", "word": "equivalent", "adjusted_p": None,
                            "test": {"difference": {"mean": 0.0, "low": None, "high": None, "count": 3}}}]}  # fmt: skip
    files.write_json(study / "report.json", report)
    track_verdict(study, TrackingConfig(False, "off", "", True))
    events = EventAccumulator(str(study / "tensorboard"))
    events.Reload()
    names = {
        *events.Tags()["scalars"],
        *(name.removesuffix("/text_summary") for name in events.Tags()["tensors"]),
    }
    assert names - {"config"} == verdict_values(study).keys()
    assert len(names) == 4


def test_a_tracker_that_refuses_the_verdict_is_reported_and_raises_nothing(
    study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_WANDB", "refuse")
    report = {"verdicts": [{"variant": "X", "word": "better", "adjusted_p": 0.01,
                            "test": {"difference": {"mean": -1.0, "low": -2.0, "high": 0.0, "count": 3}}}]}  # fmt: skip
    files.write_json(study / "report.json", report)
    track_verdict(study, TrackingConfig(True, "online", "p"))
    assert capsys.readouterr().out.startswith("wandb did not finish; see ")
    assert "no such key" in (study / "track.log").read_text()


def test_a_damaged_report_has_no_verdict(study: Path) -> None:
    for text in ("", "[]", '{"verdicts": [{}]}', json.dumps({"verdicts": None})):
        (study / "report.json").write_text(text)
        assert verdict_values(study) == {}
