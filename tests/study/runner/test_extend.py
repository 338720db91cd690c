"""Runs that are made longer: the same bits as runs that were so long from the start, and nothing lost."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt2.artifacts import checkpoint, run_record
from study.report import build
from study.runner.extend import finish_extension
from tests.small_runs import StopAfter, same
from tests.study.extended import (
    FIRST,
    START,
    WARMUP,
    Place,
    configuration,
    contents,
    interrupt_at_every_step,
    outcome,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("name", "first", "factors", "decay", "dropout"),
    [
        ("B", 10, ("2",), 0.3, 0.0),
        ("RALEARN", 10, ("2",), 0.3, 0.2),
        ("B", 7, ("1.3",), 0.2, 0.0),
        ("RALEARN", 10, ("1.5", "2"), 0.5, 0.0),
        ("B", 9, ("2.4",), 0.7, 0.2),
    ],
)
def test_an_extended_run_is_the_run_that_was_so_long_from_the_start(
    tmp_path: Path, texts: Path, name: str, first: int, factors: tuple[str, ...], decay: float, dropout: float
) -> None:
    config = configuration(texts, dropout, decay)
    place = Place(tmp_path / "extended", config, (name,), first)
    assert place.run(name) == "finished"
    for factor in factors:
        place.extend(factor)
        assert place.run(name) == "finished"
    count = place.plan().variants[name].iterations
    assert count > first
    whole = Place(tmp_path / "whole", config, (name,), count)
    assert whole.run(name) == "finished"
    assert len(outcome(whole.folder(name))[2]) == count
    assert same(outcome(place.folder(name)), outcome(whole.folder(name)))


@pytest.fixture(scope="module")
def whole_20(tmp_path_factory: pytest.TempPathFactory, texts: Path) -> Place:
    """Return a study whose run of RALEARN had 20 iterations from the start."""
    place = Place(tmp_path_factory.mktemp("whole"), configuration(texts), ("RALEARN",), 20)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    assert place.run("RALEARN") == "finished"
    torch.set_num_threads(before)
    return place


@pytest.mark.parametrize("looks", [1, 6, 14])
def test_an_extension_that_is_interrupted_anywhere_goes_on_to_the_same_bits(
    tmp_path: Path, texts: Path, whole_20: Place, looks: int
) -> None:
    place = Place(tmp_path / "extended", configuration(texts), ("RALEARN",))
    while place.run("RALEARN", StopAfter(looks)) == "interrupted":
        looks += 3
    place.extend()
    while place.run("RALEARN", StopAfter(looks)) == "interrupted":
        looks += 3
    assert same(outcome(place.folder("RALEARN")), outcome(whole_20.folder("RALEARN")))


def test_the_state_where_the_decay_begins_is_kept_alone(finished: Place) -> None:
    (kept,) = checkpoint.complete(finished.folder() / "stable")
    assert checkpoint.load(kept).iteration == START
    assert [path.name for path in checkpoint.complete(finished.folder() / "checkpoint")] == [f"{FIRST:08d}"]


def test_nothing_of_the_first_budget_is_lost(finished: Place) -> None:
    before = contents(finished.directory)
    finished.extend()
    after = contents(finished.directory)
    assert after[f"plan-{FIRST}.json"] == before["plan.json"]
    for name in ("B0", "RALEARN0"):
        for file in ("run.json", "metrics.jsonl", "validation_windows.json"):
            stem, ending = file.split(".")
            assert after[f"runs/{name}/{stem}-{FIRST}.{ending}"] == before[f"runs/{name}/{file}"]
        state = f"{FIRST:08d}/state.pt"
        assert after[f"runs/{name}/checkpoint-{FIRST}/{state}"] == before[f"runs/{name}/checkpoint/{state}"]


def test_an_extended_study_never_mixes_its_runs_with_shorter_ones(finished: Place) -> None:
    short = run_record.load(finished.folder()).fingerprint
    assert len([run for run in build.build_report(finished.directory).runs if run.used]) == 2
    finished.extend()
    finished.run("B")
    runs = build.build_report(finished.directory).runs
    assert {run.record.schedule.iterations for run in runs} == {FIRST}
    finished.run("RALEARN")
    made = build.build_report(finished.directory)
    assert all(run.used for run in made.runs)
    assert made.budget is not None
    assert made.budget.max_iterations == 2 * FIRST
    assert any("extended to 2 times" in note for note in made.notes)
    long = [run_record.load(finished.folder(name)).fingerprint for name in ("B", "RALEARN")]
    assert long[0] == long[1]
    assert short != long[0]
    assert short == dataclasses.replace(long[0], schedule=short.schedule)


def test_factors_multiply_and_count_from_the_first_budget(finished: Place) -> None:
    for factor, count in (("1.5", 15), ("1.5", 22)):
        finished.extend(factor)
        plan = finished.plan()
        assert [row.iterations for row in plan.variants.values()] == [count, count]
        assert [row.warmup_iterations for row in plan.variants.values()] == [WARMUP, WARMUP]
        finished.run("B")
        finished.run("RALEARN")
    assert plan.extended == 2.25
    assert sorted(path.name for path in finished.directory.glob("plan-*.json")) == [
        "plan-10.json",
        "plan-15.json",
    ]


def test_an_extension_can_be_interrupted_at_every_step_and_completed(finished: Place, tmp_path: Path) -> None:
    refused = []

    def complete(place: Place) -> None:
        if place.plan().extended is None:
            place.extend()
            return
        if not refused:
            refused.append(place.refusal())
        finish_extension(place.directory)

    assert interrupt_at_every_step(finished, tmp_path, Place.extend, complete) > 15
    assert "interrupted before B0, RALEARN0; fix: `make`, which completes it" in refused[0]


def test_the_hard_limit_grows_with_the_factor(tmp_path: Path, texts: Path) -> None:
    config = configuration(texts, seconds=100)
    limited = dataclasses.replace(config, budget=dataclasses.replace(config.budget, hard_limit_seconds=1000))
    place = Place(tmp_path, limited, ("B",))
    place.run()
    place.extend()
    assert place.plan().budget.max_time_seconds == 200
    assert place.plan().budget.hard_limit_seconds == 2000
    stable = place.folder() / "stable"
    loaded = checkpoint.load_latest(stable)
    assert loaded

    def with_clock(seconds: float) -> dict[str, Any]:
        clocks = loaded.meta["clocks"] | {"evaluate": seconds}
        shutil.rmtree(stable)
        checkpoint.save(stable, START, loaded.state, loaded.meta | {"clocks": clocks}, keep=1)
        place.run()
        return run_record.load(place.folder()).to_json()

    assert with_clock(1500.0)["schedule"]["cut"] is False
    (place.folder() / "checkpoint").rename(place.folder() / "elsewhere")
    seen = with_clock(2300.0)
    assert seen["schedule"]["cut"] is True
    assert any("CONFIG_GPT2_HARD_LIMIT (2000 s)" in note for note in seen["notes"])
