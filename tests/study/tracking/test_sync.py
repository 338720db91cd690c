"""`make sync` sends each run once, by `wandb sync` or by replaying it, and names what it did not send."""

import json
import shutil
from pathlib import Path

import pytest

from gpt2.artifacts.experiment_loggers import ExperimentLoggers
from gpt2.artifacts.tracker_clients import tracked
from gpt2.config.config import TrackingConfig
from gpt2.system import files
from gpt2.system.errors import UserError
from study.report.build import as_json, build_report
from study.stats.statistics import perplexity_percent
from study.tracking import sync
from study.tracking.sync import KNOWN, NOTHING, REFUSED, SENT, sync_study
from study.tracking.verdict_run import track_verdict, verdict_values
from tests.fake_trackers import install, observed
from tests.study.sample_records import a_study, edit

WANDB = TrackingConfig(True, "offline", "my-project", False)
TRACKIO = TrackingConfig(False, "off", "", True)
NONE = TrackingConfig(False, "off", "", False)


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(tmp_path / "fakes", monkeypatch)
    return a_study(tmp_path / "week", seeds=1, variants=("B", "RALEARN"))


def states(study: Path, tracking: TrackingConfig = WANDB) -> dict[str, str]:
    return {one.name: one.state for one in sync_study(study, tracking, lambda one: None)}


def with_report(study: Path) -> Path:
    files.write_json(study / "report.json", as_json(build_report(study)))
    return study


@pytest.mark.parametrize(("logger", "tracking"), [("wandb", WANDB), ("trackio", TRACKIO)])
def test_runs_without_a_logger_are_replayed_once(study: Path, logger: str, tracking: TrackingConfig) -> None:
    assert states(study, tracking) == {"B0": SENT, "RALEARN0": SENT, "verdict": NOTHING}
    calls = observed(logger)
    assert [call[0] for call in calls].count("init") == 2
    assert len([call for call in calls if call[0] == "log" and "train/loss" in call[1]]) == 600
    assert states(study, tracking) == {"B0": KNOWN, "RALEARN0": KNOWN, "verdict": NOTHING}
    assert observed(logger) == calls


def test_a_changed_run_is_sent_again_under_its_id(study: Path) -> None:
    states(study)
    edit(study, "B0", throughput={"mfu": 0.5})
    assert states(study) == {"B0": SENT, "RALEARN0": KNOWN, "verdict": NOTHING}
    ids = [call[1]["id"] for call in observed("wandb") if call[0] == "init"]
    assert len(ids) == 3
    assert len(set(ids)) == 2


def test_an_offline_recording_is_sent_by_wandb_itself(study: Path) -> None:
    run_dir = study / "runs" / "B0"
    ExperimentLoggers(run_dir, WANDB).finish(120)
    before = observed("wandb")
    assert before[0][1]["mode"] == "offline"
    assert states(study)["B0"] == SENT
    (folder,) = (run_dir / "wandb").iterdir()
    assert observed("wandb")[len(before)] == ["sync", str(folder)]
    assert states(study)["B0"] == KNOWN
    assert [call[0] for call in observed("wandb")].count("sync") == 1


def test_a_recording_that_was_sent_by_hand_is_not_sent_again(study: Path) -> None:
    run_dir = study / "runs" / "B0"
    ExperimentLoggers(run_dir, WANDB).finish(120)
    (folder,) = (run_dir / "wandb").iterdir()
    (folder / "run-x.wandb.synced").touch()
    assert states(study)["B0"] == SENT
    assert "sync" not in [call[0] for call in observed("wandb")]


@pytest.mark.parametrize("lost", [False, True])
def test_an_incomplete_or_lost_recording_is_replayed(
    study: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """lost: the folder is gone. Otherwise the logger died."""
    run_dir = study / "runs" / "B0"
    if not lost:
        monkeypatch.setenv("FAKE_WANDB", "die")
    ExperimentLoggers(run_dir, WANDB).finish(120)
    monkeypatch.delenv("FAKE_WANDB", raising=False)
    if lost:
        shutil.rmtree(run_dir / "wandb")
    assert states(study)["B0"] == SENT
    opened = [call[1] for call in observed("wandb") if call[0] == "init" and call[1]["name"] == "B0"]
    assert [one["mode"] for one in opened] == ["offline", "online"]
    assert opened[0]["id"] == opened[1]["id"] == tracked(run_dir, "wandb").run_id
    assert "sync" not in [call[0] for call in observed("wandb")]


def test_a_tracker_that_refuses_is_named_with_its_reason(
    study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ExperimentLoggers(study / "runs" / "B0", WANDB).finish(120)
    monkeypatch.setenv("FAKE_WANDB", "refuse")
    found = sync_study(study, WANDB, lambda one: None)
    assert [(one.name, one.state) for one in found[:2]] == [("B0", REFUSED), ("RALEARN0", REFUSED)]
    assert all("401: no such key" in one.detail for one in found[:2])
    monkeypatch.delenv("FAKE_WANDB")
    assert states(study)["B0"] == SENT


def test_a_run_that_has_not_ended_and_one_without_metrics_are_left(study: Path) -> None:
    edit(study, "B0", status="running")
    (study / "runs" / "RALEARN0" / "metrics.jsonl").unlink()
    assert set(states(study).values()) == {NOTHING}
    assert observed("wandb") == []


def test_without_a_network_local_trackers_are_served_and_one_line_names_the_server(
    study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_WANDB_URL", "http://127.0.0.1:9")
    both = TrackingConfig(True, "offline", "p", True)
    with pytest.raises(
        UserError, match=r"W&B at http://127\.0\.0\.1:9 cannot be reached .*; fix: "
    ) as raised:
        states(study, both)
    assert "\n" not in str(raised.value)
    assert tracked(study / "runs" / "B0", "trackio").sent
    assert observed("wandb") == []


@pytest.mark.parametrize("recorded", [True, False])
def test_a_server_that_does_not_answer_in_time_ends_the_sync(
    study: Path, monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    """recorded: W&B's folder is sent. Otherwise the run is replayed."""
    if recorded:
        ExperimentLoggers(study / "runs" / "B0", WANDB).finish(120)
    monkeypatch.setattr(sync, "SEND_SECONDS", 0.0)
    with pytest.raises(UserError, match="wandb took longer than 0 s for B0"):
        states(study)


def test_a_study_without_a_tracker_or_its_package_is_refused(
    study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="no tracker is configured; fix: make menuconfig"):
        states(study, NONE)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"wandb is not installed; fix: .* -m pip install wandb"):
        states(study)


def test_the_verdict_is_a_run_of_the_group_with_the_numbers_of_the_report(
    tmp_path: Path, study: Path
) -> None:
    judged = with_report(a_study(tmp_path / "judged", seeds=3, effect=-0.5))
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
    track_verdict(judged, TrackingConfig(True, "online", "p", True))
    for logger, kind in (("wandb", "summary"), ("trackio", "log")):
        calls = {call[0]: call[1] for call in observed(logger) if len(call) > 1}
        assert calls["init"]["name"] == "verdict"
        assert calls["init"]["group"] == "judged"
        assert calls[kind] == expected
    assert observed("wandb")[0][1]["job_type"] == "verdict"
    before = observed("wandb")
    track_verdict(judged, TrackingConfig(True, "online", "p", False))
    assert observed("wandb") == before
    assert states(judged)["verdict"] == KNOWN


def test_the_verdict_in_tensorboard_has_the_same_names(study: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report = {"verdicts": [{"variant": "B+WD=0.1", "word": "equivalent", "adjusted_p": None,
                            "test": {"difference": {"mean": 0.0, "low": None, "high": None, "count": 3}}}]}  # fmt: skip
    files.write_json(study / "report.json", report)
    track_verdict(study, TrackingConfig(False, "off", "", False, True))
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
    track_verdict(study, TrackingConfig(True, "online", "p", False))
    assert capsys.readouterr().out.startswith("wandb did not finish; see ")
    assert "no such key" in (study / "track.log").read_text()


def test_a_damaged_report_has_no_verdict(study: Path) -> None:
    for text in ("", "[]", '{"verdicts": [{}]}', json.dumps({"verdicts": None})):
        (study / "report.json").write_text(text)
        assert verdict_values(study) == {}
