"""W&B, trackio and TensorBoard get the same names, values and steps; W&B and trackio are fakes, TensorBoard is real."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gpt2.artifacts import experiment_loggers, run_record
from gpt2.artifacts.experiment_loggers import ExperimentLoggers
from gpt2.artifacts.tracker_clients import CLIENTS, tracked
from gpt2.config.config import TrackingConfig
from tests.fake_trackers import install, observed
from tests.study.sample_records import a_study

ALL = TrackingConfig(True, "online", "my-project", True, True)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(tmp_path / "fakes", monkeypatch)
    return a_study(tmp_path / "week", seeds=1, variants=("B",)) / "runs" / "B0"


def of_tensorboard(folder: Path) -> tuple[dict[str, list[tuple[int, float]]], set[str]]:
    """The scalars by name, and the names of texts."""
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    tags = events.Tags()
    curves = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in tags["scalars"]}
    return curves, set(tags["tensors"])


def of_fake(run_dir: Path, logger: str) -> dict[str, list[tuple[int, float]]]:
    final = run_record.load(run_dir).progress
    assert final
    curves: dict[str, list[tuple[int, float]]] = {}
    for call in observed(logger):
        if call[0] in ("log", "summary"):
            for name, value in call[1].items():
                curves.setdefault(name, []).append((call[2] if call[0] == "log" else final.iterations, value))
    return curves


def test_names_values_and_steps_are_the_same_in_all_trackers_and_a_second_logger_replaces_them(
    run_dir: Path,
) -> None:
    assert ExperimentLoggers(run_dir, ALL).finish(120) is None, (run_dir / "track.log").read_text()
    board, texts = of_tensorboard(run_dir)
    wandb, trackio = of_fake(run_dir, "wandb"), of_fake(run_dir, "trackio")
    assert wandb.keys() == trackio.keys() == board.keys()
    assert {"train/loss", "train/tokens", "validation/loss", "memory/peak_allocated_bytes"} <= wandb.keys()
    assert wandb == trackio
    for name, points in wandb.items():
        assert [step for step, _ in board[name]] == [step for step, _ in points], name
        assert [value for _, value in board[name]] == pytest.approx([value for _, value in points], rel=1e-6)
    assert texts == {"config/text_summary"}
    # as after an interruption: the run is read from its start
    ids = [tracked(run_dir, logger).run_id for logger in CLIENTS]
    ExperimentLoggers(run_dir, ALL).finish(120)
    assert of_tensorboard(run_dir)[0] == board
    assert [tracked(run_dir, logger).run_id for logger in CLIENTS] == ids
    assert ["delete", ids[1]] in observed("trackio")
    opened = [call[1] for call in observed("wandb") if call[0] == "init"]
    assert [(one["id"], one["resume"]) for one in opened] == [(ids[0], "allow")] * 2


def test_the_study_is_the_group_and_arm_and_seed_are_tags(run_dir: Path) -> None:
    ExperimentLoggers(run_dir, dataclasses.replace(ALL, tensorboard=False)).finish(120)
    about = {logger: observed(logger)[0][1] for logger in ("wandb", "trackio")}
    assert {one["group"] for one in about.values()} == {"week"}
    assert about["wandb"]["tags"] == about["trackio"]["config"]["tags"] == ["B", "seed 0"]
    ids = {about["wandb"]["id"], about["trackio"]["config"]["run_id"]}
    assert ids == {tracked(run_dir, logger).run_id for logger in ("wandb", "trackio")}


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_the_note_has_the_digest_of_the_complete_run(run_dir: Path, mode: str) -> None:
    tracking = dataclasses.replace(ALL, wandb_mode=mode, tensorboard=False)
    ExperimentLoggers(run_dir, tracking).finish(120)
    expected = experiment_loggers.recorded_digest(run_dir, run_record.load(run_dir))
    notes = {logger: tracked(run_dir, logger) for logger in ("wandb", "trackio")}
    assert {note.digest for note in notes.values()} == {expected}
    assert notes["wandb"].sent is (mode == "online")
    assert notes["trackio"].sent


def test_every_number_counts_in_the_digest(run_dir: Path) -> None:
    record = run_record.load(run_dir)
    before = experiment_loggers.recorded_digest(run_dir, record)
    path = run_dir / "metrics.jsonl"
    lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["loss"] += 1e-9
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    after = experiment_loggers.recorded_digest(run_dir, record)
    assert after != before
    assert record.throughput
    faster = dataclasses.replace(record, throughput=dataclasses.replace(record.throughput, mfu=0.5))
    assert experiment_loggers.recorded_digest(run_dir, faster) != after


def test_a_damaged_note_counts_as_none(run_dir: Path) -> None:
    (run_dir / "tracked_wandb.json").write_text('{"run_id": 3')
    assert tracked(run_dir, "wandb").digest == ""
