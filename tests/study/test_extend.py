"""Runs that are made longer: the same bits as runs that were so long from the start, or a refusal."""

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator
from copy import copy as copies
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt2 import checkpoint, record
from gpt2.batch import BatchPlan, plan_batch
from gpt2.config import Config
from gpt2.interrupt import Interrupted, Stop
from gpt2.target import resolve
from gpt2.train import Run, RunPlan
from ra.settings import AlternationSettings
from ra.variants import variant
from study import extend as extending
from study import guard, report, space
from study.extend import ExtendError, extend, finish_extension, parse_factor
from study.guard import StudyError, refuse_another_configuration
from study.plan import load_plan
from study.settings import StudySettings
from tests import small_runs
from tests.small_runs import StopAfter, same

TOKENS = 4 * 16  # of an iteration
TEXT = "CONFIG_SCHEDULE_WSD=y\nCONFIG_GPT2_MAX_ITERS=10\nCONFIG_GPT2_MAX_TIME=0\nCONFIG_SEEDS=1\n"
FIRST, WARMUP, START = 10, 2, 7  # iterations, of the warm-up, before the decay


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_runs.write_texts(tmp_path_factory.mktemp("runs") / "texts")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def configuration(texts: Path, dropout: float = 0.0, decay: float = 0.3, seconds: int = 0) -> Config:
    return small_runs.configuration(texts, FIRST, dropout=dropout, seconds=seconds, schedule=("wsd", decay))


class Place:
    """A study in a folder, its runs made in this process as scripts.train makes them."""

    def __init__(self, folder: Path, config: Config, names: tuple[str, ...], first: int = FIRST) -> None:
        self.config, self.settings = config, StudySettings("s", names, 1, folder, False)
        self.directory = folder / "s"
        self.directory.mkdir(parents=True)
        (self.directory / "config").write_text(TEXT)
        expected = {"variants": list(names), "seeds": 1}
        record.write_json(self.directory / "expected.json", expected)
        row = {"class": "any", "iterations": first, "tokens": first * TOKENS, "warmup_iterations": WARMUP}
        plan = {
            "schema": 1, "batch": dataclasses.asdict(plan_batch(4, 2, 1, 16)), "classes": {}, "notes": [],
            "budget": dataclasses.asdict(config.budget), "variants": {name: dict(row) for name in names},
            "evaluation": {"interval_tokens": 128, "grid_tokens": []},
        }  # fmt: skip
        record.write_json(self.directory / "plan.json", plan)

    def folder(self, name: str = "B") -> Path:
        return self.directory / "runs" / f"{name}0"

    def run(self, name: str = "B", stop: Stop | None = None) -> str:
        plan = load_plan(self.directory)
        assert plan
        row = plan["variants"][name]
        run_plan = RunPlan(
            directory=self.folder(name), run=f"{name}0", variant=name, seed=0, iterations=row["iterations"],
            batch=BatchPlan(**plan["batch"]), warmup_iterations=row["warmup_iterations"],
            extended=plan.get("extended", 1.0),
        )  # fmt: skip
        attention = variant(name, self.config.model, AlternationSettings("output", 0.5, 100.0)).attention
        return Run(run_plan, self.config, resolve(self.config.target), attention, stop or Stop()).train()

    def extend(self, factor: str = "2") -> list[str]:
        return extend(self.config, self.settings, TEXT, parse_factor(factor))

    def refusal(self, factor: str = "2") -> str:
        """What extend says, having changed nothing."""
        before = contents(self.directory)
        with pytest.raises((ExtendError, StudyError, space.SpaceError)) as caught:
            self.extend(factor)
        assert contents(self.directory) == before
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def alter(self, name: str = "B", **entries: Any) -> None:
        seen = record.load(self.folder(name))
        record.write_json(self.folder(name) / "run.json", seen | entries)


def contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def outcome(folder: Path) -> tuple[Any, ...]:
    """Weights, optimizer, every training loss and rate, every validation loss: what must agree to the last bit."""
    loaded = checkpoint.load_latest(folder / "checkpoint")
    assert loaded
    seen = record.load(folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return (
        loaded.iteration,
        loaded.state,
        [
            [line[key] for key in ("iteration", "loss", "learning_rate", "grad_norm")]
            for line in lines
            if line["event"] == "train"
        ],
        [[tokens, loss] for tokens, _, loss in seen["validation"]["history"]],
        seen["learned"],
        [seen["status"], seen["progress"]["iterations"]],
        json.loads((folder / "validation_windows.json").read_text()),
    )


@pytest.mark.parametrize("name", ["B", "RALEARN"])
@pytest.mark.parametrize(
    ("first", "factors", "decay", "dropout"),
    [
        (10, ("2",), 0.3, 0.0),
        (10, ("2",), 0.3, 0.2),
        (7, ("1.3",), 0.2, 0.0),
        (10, ("1.5", "2"), 0.5, 0.0),
        (9, ("2.4",), 0.7, 0.0),
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
    plan = load_plan(place.directory)
    assert plan
    count = plan["variants"][name]["iterations"]
    assert count > first
    whole = Place(tmp_path / "whole", config, (name,), count)
    assert whole.run(name) == "finished"
    assert len(outcome(whole.folder(name))[2]) == count
    assert same(outcome(place.folder(name)), outcome(whole.folder(name)))


@pytest.mark.parametrize("looks", [1, 6, 14])
def test_an_extension_that_is_interrupted_anywhere_goes_on_to_the_same_bits(
    tmp_path: Path, texts: Path, looks: int
) -> None:
    config = configuration(texts)
    whole = Place(tmp_path / "whole", config, ("RALEARN",), 20)
    whole.run("RALEARN")
    place = Place(tmp_path / "extended", config, ("RALEARN",))
    while place.run("RALEARN", StopAfter(looks)) == "interrupted":
        looks += 3
    place.extend()
    while place.run("RALEARN", StopAfter(looks)) == "interrupted":
        looks += 3
    assert same(outcome(place.folder("RALEARN")), outcome(whole.folder("RALEARN")))


@pytest.fixture
def finished(tmp_path: Path, texts: Path) -> Place:
    place = Place(tmp_path, configuration(texts), ("B", "RALEARN"))
    assert [place.run("B"), place.run("RALEARN")] == ["finished", "finished"]
    return place


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
    short = record.load(finished.folder())["fingerprint"]
    assert len([run for run in report.build(finished.directory).runs if run.used]) == 2
    finished.extend()
    runs = report.build(finished.directory).runs
    assert [(run.status, run.used) for run in runs] == [("interrupted", False)] * 2
    finished.run("B")
    runs = {run.name: run for run in report.build(finished.directory).runs}
    assert runs["B0"].used
    assert runs["RALEARN0"].why_not == "it is interrupted"
    finished.run("RALEARN")
    made = report.build(finished.directory)
    assert all(run.used for run in made.runs)
    assert made.budget["max_iterations"] == 2 * FIRST
    assert any("extended to 2 times" in note for note in made.notes)
    long = [record.load(finished.folder(name))["fingerprint"] for name in ("B", "RALEARN")]
    assert long[0] == long[1]
    assert [key for key in short if short[key] != long[0][key]] == ["schedule"]


def test_factors_multiply_and_count_from_the_first_budget(finished: Place) -> None:
    for factor, count in (("1.5", 15), ("1.5", 22)):
        finished.extend(factor)
        plan = load_plan(finished.directory)
        assert plan
        assert [row["iterations"] for row in plan["variants"].values()] == [count, count]
        assert [row["warmup_iterations"] for row in plan["variants"].values()] == [WARMUP, WARMUP]
        finished.run("B")
        finished.run("RALEARN")
    assert plan["extended"] == 2.25
    assert sorted(path.name for path in finished.directory.glob("plan-*.json")) == [
        "plan-10.json",
        "plan-15.json",
    ]


def test_an_extension_that_is_cut_off_is_completed_before_anything_runs(
    finished: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = extending._set_back, []

    def cut_off(folder: Path) -> None:
        calls.append(folder)
        if len(calls) == 2:
            raise Interrupted("SIGKILL")
        real(folder)

    monkeypatch.setattr(extending, "_set_back", cut_off)
    with pytest.raises(Interrupted):
        finished.extend()
    assert "`make`" in finished.refusal()
    monkeypatch.setattr(extending, "_set_back", real)
    finish_extension(finished.directory)
    assert {record.load(finished.folder(name))["status"] for name in ("B", "RALEARN")} == {"interrupted"}
    before = contents(finished.directory)
    finish_extension(finished.directory)
    assert contents(finished.directory) == before


def test_an_extension_can_be_cut_off_at_every_step_and_begun_again(
    finished: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write, removal and renaming is a step; what comes of it in the end is that of one that was not cut off."""

    def copy(number: int) -> Place:
        made = copies(finished)
        made.settings = dataclasses.replace(finished.settings, results_dir=tmp_path / f"copy{number}")
        made.directory = tmp_path / f"copy{number}" / "s"
        shutil.copytree(finished.directory, made.directory)
        return made

    whole = copy(0)
    whole.extend()
    for cut_at in range(1, 100):
        place, steps = copy(cut_at), []

        def counted(function: Any, steps: list[str] = steps, cut_at: int = cut_at) -> Any:
            def call(*arguments: Any, **named: Any) -> Any:
                steps.append(function.__name__)
                if len(steps) == cut_at:
                    raise Interrupted("SIGKILL")
                return function(*arguments, **named)

            return call

        with monkeypatch.context() as patch, contextlib.suppress(Interrupted):
            patch.setattr(record, "write_text", counted(record.write_text))
            patch.setattr(Path, "unlink", counted(Path.unlink))
            patch.setattr(Path, "rename", counted(Path.rename))
            place.extend()
            break
        if "extended" in (load_plan(place.directory) or {}):
            finish_extension(place.directory)
        else:
            place.extend()
        assert contents(place.directory) == contents(whole.directory)
    assert cut_at > 15


@pytest.mark.parametrize("factor", ["1", "0.5", "-2", "two", "nan", "1e3", ""])
def test_a_factor_that_makes_nothing_longer_is_refused(factor: str) -> None:
    with pytest.raises(ExtendError, match="FACTOR=2"):
        parse_factor(factor)


def test_a_factor_is_read_exactly() -> None:
    assert parse_factor("1.1") == Fraction(11, 10)


def test_a_factor_too_small_to_add_an_iteration_is_refused(finished: Place) -> None:
    assert "adds no iteration" in finished.refusal("1.05")


def test_a_cosine_is_refused_and_what_would_be_right_is_named(finished: Place) -> None:
    finished.config = dataclasses.replace(
        finished.config, optimizer=dataclasses.replace(finished.config.optimizer, schedule="cosine")
    )
    message = finished.refusal()
    assert "ended at its count" in message
    assert "CONFIG_SCHEDULE_WSD=y" in message
    assert "CONFIG_STUDY_NAME" in message


@pytest.mark.parametrize("status", ["failed", "interrupted", "running"])
def test_a_run_that_is_not_finished_is_named(finished: Place, status: str) -> None:
    finished.alter("RALEARN", status=status)
    assert f"RALEARN0 is {status}" in finished.refusal()


def test_a_run_that_is_missing_is_named(finished: Place) -> None:
    finished.settings = dataclasses.replace(finished.settings, seeds=2)
    assert "B1 is missing" in finished.refusal()


def test_a_run_outside_the_configuration_is_extended_with_the_others(finished: Place) -> None:
    finished.settings = dataclasses.replace(finished.settings, variants=("B",))
    assert finished.extend()[0].endswith("not gone on with: RALEARN0")
    assert record.load(finished.folder("RALEARN"))["status"] == "interrupted"


def test_a_cut_schedule_is_refused(finished: Place) -> None:
    finished.alter(schedule={"iterations": FIRST, "cut": True})
    assert "B0 was cut" in finished.refusal()


def test_a_run_of_another_plan_is_refused(finished: Place) -> None:
    finished.alter(schedule={"iterations": FIRST - 1, "cut": False})
    assert f"planned with {FIRST - 1} iterations" in finished.refusal()


def test_without_the_checkpoint_of_the_decay_there_is_no_going_on(finished: Place) -> None:
    stable = finished.folder("RALEARN") / "stable"
    stable.rename(stable.with_name("elsewhere"))
    assert f"no checkpoint of iteration {START}" in finished.refusal()


def test_a_damaged_checkpoint_of_the_decay_is_found_before_anything_is_changed(finished: Place) -> None:
    path = finished.folder("RALEARN") / "stable" / f"{START:08d}" / "state.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert "is altered" in finished.refusal()


def test_a_study_that_was_never_run_is_refused(tmp_path: Path, texts: Path) -> None:
    place = Place(tmp_path, configuration(texts), ("B",))
    (place.directory / "plan.json").unlink()
    assert "nothing to extend" in place.refusal()


def test_a_disk_without_room_is_refused_before_anything_is_changed(
    finished: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "free_bytes", lambda path: 2**20)
    assert "free space" in finished.refusal()


def test_a_study_that_is_being_run_is_not_extended(finished: Place) -> None:
    with guard.locked(finished.directory), pytest.raises(StudyError, match="is being run"):
        finished.extend()


def test_another_budget_in_the_configuration_is_refused_and_extend_is_named(finished: Place) -> None:
    for change in ("CONFIG_GPT2_MAX_ITERS=20", "CONFIG_GPT2_MAX_ITERS=5"):
        other = TEXT.replace("CONFIG_GPT2_MAX_ITERS=10", change)
        with pytest.raises(StudyError, match=r"CONFIG_GPT2_MAX_ITERS: 10 -> .*make extend FACTOR=2"):
            refuse_another_configuration(finished.directory, other)
    finished.extend()  # the budget of .config is still the first one's, whatever the plan says
    refuse_another_configuration(finished.directory, TEXT)
    with pytest.raises(StudyError, match="make extend"):
        refuse_another_configuration(finished.directory, TEXT.replace("ITERS=10", "ITERS=20"))
    with pytest.raises(StudyError) as caught:
        refuse_another_configuration(finished.directory, TEXT + "CONFIG_LEARNING_RATE=1\n")
    assert "make extend" not in str(caught.value)


def test_the_limit_of_the_training_clock_grows_with_the_factor(tmp_path: Path, texts: Path) -> None:
    place = Place(tmp_path, configuration(texts, seconds=100), ("B",))
    place.run()
    place.extend()
    plan = load_plan(place.directory)
    assert plan
    assert plan["budget"]["max_time_seconds"] == 200
    stable = place.folder() / "stable"
    loaded = checkpoint.load_latest(stable)
    assert loaded

    def with_clock(seconds: float) -> dict[str, Any]:
        clocks = loaded.meta["clocks"] | {"train": seconds}
        shutil.rmtree(stable)
        checkpoint.save(stable, START, loaded.state, loaded.meta | {"clocks": clocks}, keep=1)
        place.run()
        return record.load(place.folder())

    assert with_clock(150.0)["schedule"]["cut"] is False
    (place.folder() / "checkpoint").rename(place.folder() / "elsewhere")
    seen = with_clock(230.0)
    assert seen["schedule"]["cut"] is True
    assert any("limit of 200 s" in note for note in seen["notes"])
