"""W&B and TensorBoard get the same names, values and steps; W&B is a fake, TensorBoard is real."""

import threading
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from runtime import files, run_record
from runtime.settings import TrackingConfig
from study import trackers
from study.trackers import fixed_id, followed_by_trackers, forward
from tests.fake_trackers import install, observed
from tests.small_runs import configuration, planned
from tests.study.sample_records import a_study

BOTH = TrackingConfig(True, "online", "my-project", True)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(tmp_path / "fakes", monkeypatch)
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 120.0)
    folder = a_study(tmp_path / "week", seeds=1, variants=("B",)) / "runs" / "B0"
    planned(folder, replace(configuration(tmp_path, 1), tracking=BOTH), "B")
    return folder


def follow(run_dir: Path) -> None:
    with followed_by_trackers(run_dir, BOTH):
        pass


def of_tensorboard(folder: Path) -> tuple[dict[str, list[tuple[int, float]]], set[str]]:
    """The scalars by name, and the names of texts."""
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    tags = events.Tags()
    curves = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in tags["scalars"]}
    return curves, set(tags["tensors"])


def of_wandb(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    final = run_record.load(run_dir).progress
    assert final
    curves: dict[str, list[tuple[int, float]]] = {}
    for call in observed():
        if call[0] in ("log", "summary"):
            for name, value in call[1].items():
                curves.setdefault(name, []).append((call[2] if call[0] == "log" else final.iterations, value))
    return curves


def test_names_values_and_steps_are_the_same_in_both_trackers_and_a_second_logger_replaces_them(
    run_dir: Path,
) -> None:
    follow(run_dir)
    board, texts = of_tensorboard(run_dir)
    wandb = of_wandb(run_dir)
    assert wandb.keys() == board.keys()
    assert {"train/loss", "train/tokens", "validation/tokens", "memory/peak_allocated_bytes"} <= wandb.keys()
    for name, points in wandb.items():
        assert [step for step, _ in board[name]] == [step for step, _ in points], name
        assert [value for _, value in board[name]] == pytest.approx([value for _, value in points], rel=1e-6)
    assert texts == {"plan/text_summary"}
    assert all(len({step for step, _ in points}) == len(points) for points in board.values())
    # as after an interruption: the run is read from its start
    follow(run_dir)
    assert of_tensorboard(run_dir)[0] == board
    about = [call[1] for call in observed() if call[0] == "init"]
    assert [(one["id"], one["resume"]) for one in about] == [(fixed_id(run_dir), "allow")] * 2
    assert (about[0]["group"], about[0]["tags"]) == ("week", ["B", "seed 0"])


def test_a_step_that_a_resumed_run_repeats_is_sent_once(run_dir: Path) -> None:
    metrics, tracker, ended = run_dir / "metrics.jsonl", mock.Mock(), threading.Event()
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:9]))
    follower = threading.Thread(target=forward, args=(tracker, run_dir, ended))
    follower.start()
    while len(tracker.log.mock_calls) < 9:
        assert follower.is_alive()
    files.write_text(
        metrics, "".join(lines)
    )  # as after a resume: another file, which began at an earlier step
    ended.set()
    follower.join()
    assert [call.args[1] for call in tracker.log.mock_calls[:-1]] == [*range(1, len(lines) + 1)]
