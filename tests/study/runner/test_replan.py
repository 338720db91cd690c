"""A plan that was timed on a busy machine is made anew at the first steps that show it, as long as nothing is saved."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2.config.config import Config, read_symbols
from gpt2.system import files
from study.analysis.timing import EARLY
from study.runner import study as running
from study.runner.child_process import Session, StopAsked
from study.runner.plan import load_plan, save_plan
from study.runner.replan import LEAST_STEPS, LOOK_MOST, MOST_REPLANS, SET_ASIDE, Watch, anew, tidy, watch
from study.runner.study import Study
from study.runner.terminal import Estimate, Terminal
from tests.study.sample_records import VARIANTS, a_record

BATCH = {"effective": 8, "micro": 4, "accumulation": 2, "world_size": 1, "block_size": 64}
TOKENS = 8 * 64


def a_plan(seconds: float = 1.0, limit: int = 40, **changes: Any) -> dict[str, Any]:
    """One whose steps took `seconds`, of a budget of `limit` seconds."""
    row = {"class": "one", "iterations": round(limit / seconds) + 2, "tokens": 0}
    return {
        "batch": BATCH,
        "budget": {"max_time_seconds": limit},
        "classes": {"one": {"seconds_per_iteration": seconds}},
        "variants": {name: dict(row) for name in VARIANTS},
        "notes": [],
    } | changes


def steps(seconds: float, count: int, plan: dict[str, Any], told: int = 1) -> list[dict[str, Any]]:
    """What a run tells of its first steps, every `told`-th of them; two are warm-up."""
    return [
        {
            "event": "train",
            "iteration": k,
            "iterations": plan["variants"]["B"]["iterations"],
            "train_seconds": max(0, k - 2) * seconds,
            "tokens_per_second": TOKENS / seconds if k > 2 else None,
        }
        for k in range(1, count + 1, told)
    ]


def heard(seen: Watch, events: list[dict[str, Any]]) -> list[str]:
    return [reason for reason in map(seen.hear, events) if reason]


@settings(deadline=None)
@given(
    st.floats(0.01, 3.0),
    st.floats(0.05, 2.0).filter(lambda ratio: abs(ratio - EARLY) > 1e-6),
    st.integers(8, 600),
    st.integers(1, 3),
)
def test_a_plan_is_found_wrong_if_and_only_if_steps_take_much_less_than_was_timed(
    planned: float, ratio: float, count: int, told: int
) -> None:
    """told: the run tells every so many of its steps. At the latest the last shows it."""
    plan = a_plan(planned, limit=round(planned * count) + 1)
    seen = Watch("B0", "B", plan)
    count = plan["variants"]["B"]["iterations"]
    events = steps(ratio * planned, count, plan, told)
    reasons = heard(seen, events)
    timed = [event["iteration"] for event in events if event["tokens_per_second"]]
    assert len(reasons) == (ratio < EARLY and timed[-1] - timed[0] >= LEAST_STEPS)
    if reasons:
        assert f"{ratio * planned:.3g} s each" in reasons[0]
        assert f"{planned:.3g} s, on a machine that was busy" in reasons[0]


@settings(deadline=None)
@given(st.integers(0, 2**32), st.floats(0.85, 1.3))
def test_a_machine_that_wanders_does_not_make_it_wrong(seed: int, ratio: float) -> None:
    """Steps that vary by a tenth, one in ten of them twice as long, as fast as was timed give or take a fifth."""
    draw, plan = np.random.default_rng(seed), a_plan(0.25)
    events, spent = steps(0.25, 162, plan), 0.0
    for event in events:
        if event["tokens_per_second"]:
            spent += 0.25 * ratio * draw.lognormal(0, 0.1) * (2 if draw.random() < 0.1 else 1)
        event["train_seconds"] = spent
    assert not heard(Watch("B0", "B", plan), events)


def test_it_is_found_out_early_and_once() -> None:
    plan = a_plan(1.0, limit=7200)
    seen = Watch("B0", "B", plan)
    slow = steps(0.2, 7202, plan, told=2)
    heard_at = [place for place, event in enumerate(slow) if seen.hear(event)]
    assert len(heard_at) == 1
    assert slow[heard_at[0]]["train_seconds"] == pytest.approx(LOOK_MOST, abs=1)
    assert not seen.waiting


def test_other_events_say_nothing() -> None:
    seen = Watch("B0", "B", a_plan())
    for kind in ("started", "phase", "validation", "note", "spike"):
        assert not seen.hear({"event": kind, "iteration": 9, "tokens_per_second": 1e9})
    assert seen.waiting
    assert not seen.first


@pytest.mark.parametrize(
    ("change", "watched"),
    [
        ({}, True),
        ({"budget": {"max_time_seconds": 0}}, False),
        ({"classes": {}}, False),
        ({"planned_anew": MOST_REPLANS - 1}, True),
        ({"planned_anew": MOST_REPLANS}, False),
        ({"extended": 2.0}, False),
        ({"variants": {"B": {"class": "one", "iterations": 38, "tokens": 0}}}, False),  # by another limit
        ({"variants": {"B": {"class": "one", "iterations": 38, "tokens": 0}}, "margin": 0.05}, True),
        (
            {
                "variants": {
                    "B": {"class": "one", "iterations": 9},
                    "RALEARN": {"class": "one", "iterations": 41},
                }
            },
            True,
        ),
    ],
)
def test_only_counts_that_a_time_limit_decides_are_watched(
    tmp_path: Path, change: dict[str, Any], watched: bool
) -> None:
    assert bool(watch(tmp_path, a_plan(**change), "B", 0)) is watched


@pytest.mark.parametrize(
    ("written", "watched"),
    [
        ("runs/B0/config", True),
        ("runs/B0/checkpoint", True),  # empty
        ("runs/RAALL0/checkpoint/00000010/meta.json", False),
        ("runs/RAALL0/stable/00000010/meta.json", False),
    ],
)
def test_nothing_that_was_saved_is_given_up(tmp_path: Path, written: str, watched: bool) -> None:
    path = tmp_path / written
    path.parent.mkdir(parents=True)
    path.write_text("x") if path.suffix or path.name == "config" else path.mkdir()
    assert bool(watch(tmp_path, a_plan(), "B", 0)) is watched


@pytest.mark.parametrize(("spent", "watched"), [(0.0, True), (3.9, True), (4.1, False), (30.0, False)])
def test_a_run_that_was_stopped_before_the_look_is_looked_at_when_it_goes_on(
    tmp_path: Path, spent: float, watched: bool
) -> None:
    (tmp_path / "runs/B0/checkpoint/00000003").mkdir(parents=True)
    value = a_record("B", 0, 4.0) | {"status": "interrupted"}
    value["progress"]["train_seconds"] = spent
    files.write_json(tmp_path / "runs/B0/run.json", value)
    assert bool(watch(tmp_path, a_plan(limit=40), "B", 0)) is watched
    assert not watch(tmp_path, a_plan(limit=40), "RAALL", 0)


@pytest.mark.parametrize(("status", "watched"), [("finished", False), ("failed", True), ("running", True)])
def test_a_finished_run_keeps_its_plan_though_its_checkpoint_was_deleted(
    tmp_path: Path, status: str, watched: bool
) -> None:
    (tmp_path / "runs/RAALL0").mkdir(parents=True)
    files.write_json(tmp_path / "runs/RAALL0/run.json", a_record("RAALL", 0, 4.0) | {"status": status})
    assert bool(watch(tmp_path, a_plan(), "B", 0)) is watched


# -- a study -----------------------------------------------------------------------------------------------------


class Process:
    """A run of steps that take `seconds`: it tells of them and finishes, unless it is killed."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds, self.killed = folder, seconds, False
        self.log = folder / "log.txt"

    def events(self) -> Iterator[dict[str, Any]]:
        plan = load_plan(self.folder.parents[1])
        assert plan
        count = plan["variants"]["B"]["iterations"]
        yield {"event": "started", "iteration": 0}
        for event in steps(self.seconds, count, plan):
            yield event | {"loss": 4.0}
        made = a_record("B", 0, 4.0)
        made["schedule"]["iterations"] = count
        files.write_json(self.folder / "run.json", made)

    def kill(self) -> None:
        """It had saved, and written its log."""
        self.killed = True
        (self.folder / "checkpoint" / "00000005").mkdir(parents=True)
        self.log.write_text("of the first")
        value = a_record("B", 0, 4.0) | {"status": "running"}
        value["progress"]["train_seconds"] = 3.0
        files.write_json(self.folder / "run.json", value)

    def wait(self) -> int:
        return -9 if self.killed else 0

    def last_words(self) -> str:
        return ""


class Place:
    """A study on a machine that is `busy` times slower while steps are timed, at each timing in turn."""

    def __init__(self, study: Study, busy: list[float], patch: pytest.MonkeyPatch) -> None:
        self.study, self.busy, self.processes = study, busy, list[Process]()
        self.followed: list[int] = []  # the processes, by number, that a tracker followed
        place = self

        class Fake(Session):
            @contextlib.contextmanager
            def process(self, arguments: list[str], log: Path) -> Iterator[Any]:
                place.processes.append(Process(study.run_dir("B", 0), 1.0))
                yield place.processes[-1]

        class Tracker:
            def __init__(self, *arguments: Any) -> None:
                place.followed.append(len(place.processes))

            def finish(self) -> None: ...

        patch.setattr(running, "ExperimentLoggers", Tracker)
        study.session = Fake()
        study.directory.mkdir(parents=True)

    def run(self, patch: pytest.MonkeyPatch) -> dict[str, Any]:
        study = self.study
        patch.setattr(study, "make_plan", self.make_plan)
        plan = save_plan(study.directory, self.make_plan())
        study.one(("B", 0), plan, Terminal(Estimate(1, None), 1))
        stands = load_plan(study.directory)
        assert stands == json.loads(json.dumps(plan))
        return plan

    def make_plan(self, batch: Any = None, margin: Any = None) -> dict[str, Any]:
        return a_plan(self.busy.pop(0), limit=40, notes=["of the making"])


@pytest.fixture
def study(a100_config: Config) -> Study:
    return Study(read_symbols(Path(".config")), Path(".config").read_text())


def test_a_study_that_was_planned_on_a_busy_machine_plans_anew_and_begins_its_first_run_again(
    study: Study, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Place(study, [5.0, 1.0], monkeypatch)
    plan = place.run(monkeypatch)
    assert [process.killed for process in place.processes] == [True, False]
    assert place.followed == [2]  # the run that stays alone
    assert plan["variants"]["B"]["iterations"] == 42
    assert (plan["planned_anew"], len(plan["notes"])) == (1, 2)
    assert plan["notes"][1].startswith("planned anew after the first steps of B0, which took 1 s each")
    assert study.status("B", 0) == "finished"
    assert not (study.run_dir("B", 0) / "checkpoint").exists()
    assert (study.run_dir("B", 0) / "config").exists()
    aside = study.directory / SET_ASIDE / "B0-1"
    assert (aside / "log.txt").read_text() == "of the first"
    assert not (aside / "checkpoint").exists()
    assert "planned anew after the first steps of B0" in capsys.readouterr().out


def test_a_machine_that_stays_busy_while_it_plans_is_not_planned_for_without_end(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(study, [5.0, 4.0, 3.0, 1.0], monkeypatch)
    plan = place.run(monkeypatch)
    assert len(place.processes) == 1 + MOST_REPLANS
    assert len(list((study.directory / SET_ASIDE).iterdir())) == MOST_REPLANS
    assert plan["planned_anew"] == MOST_REPLANS
    assert plan["variants"]["B"]["iterations"] == 15
    assert study.status("B", 0) == "finished"


@pytest.mark.parametrize("timed", [1.0, 0.5, 1.3])
def test_a_plan_that_was_timed_well_or_on_a_faster_machine_stands(
    study: Study, monkeypatch: pytest.MonkeyPatch, timed: float
) -> None:
    place = Place(study, [timed], monkeypatch)
    plan = place.run(monkeypatch)
    assert (len(place.processes), place.followed) == (1, [1])
    assert "planned_anew" not in plan


def test_a_study_that_is_stopped_at_that_moment_plans_anew_the_next_time(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(study, [5.0, 1.0], monkeypatch)
    first = place.make_plan()
    save_plan(study.directory, first)
    plain_kill = Process.kill

    def kill(process: Process) -> None:
        plain_kill(process)
        study.session.asked = 1

    monkeypatch.setattr(Process, "kill", kill)
    with pytest.raises(StopAsked):
        study.one(("B", 0), first, Terminal(Estimate(1, None), 1))
    stands = load_plan(study.directory)
    assert stands == first
    assert watch(study.directory, stands, "B", 0)


def test_a_run_that_finished_before_it_could_be_ended_stays(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(process: Process) -> None:
        process.killed = True
        files.write_json(process.folder / "run.json", a_record("B", 0, 4.0))

    monkeypatch.setattr(Process, "kill", kill)
    place = Place(study, [5.0], monkeypatch)
    plan = place.run(monkeypatch)
    assert study.status("B", 0) == "finished"
    assert "planned_anew" not in plan
    assert place.followed == [1]
    assert not (study.directory / SET_ASIDE).exists()


@pytest.mark.parametrize("spent", [3.0, 3 * LOOK_MOST])
def test_a_run_that_goes_on_from_a_checkpoint_is_not_given_up_whatever_its_record_says(spent: float) -> None:
    """A record of 0 seconds: the process before could not even take its state over."""
    plan = a_plan(5.0, limit=7200)
    events = steps(1.0, 400, plan)
    for event in events:
        event["train_seconds"] += spent
        event["iteration"] += round(spent)
    assert len(heard(Watch("B0", "B", plan), events)) == (spent == 3.0)


def test_steps_that_take_longer_still_leave_the_first_plan(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(study, [5.0, 8.0, 2.0], monkeypatch)
    plan = place.run(monkeypatch)
    assert [kind["seconds_per_iteration"] for kind in plan["classes"].values()] == [2.0]
    assert plan["planned_anew"] == 2
    assert "timed again, they took longer still: the plan stands" in plan["notes"]


def test_a_class_that_is_no_longer_in_the_study_does_not_make_the_new_times_look_shorter() -> None:
    """VARIANTS may have lost one since the plan was made."""
    plan = a_plan(2.0)
    plan["classes"]["lost"] = {"seconds_per_iteration": 9.0}
    anew(plan, a_plan(3.0), "busy")
    assert plan["classes"]["one"]["seconds_per_iteration"] == 2.0
    assert plan["notes"] == ["busy", "timed again, they took longer still: the plan stands"]
    anew(plan, a_plan(1.0, notes=["of the making"]), "busy again")
    assert plan["classes"] == a_plan(1.0)["classes"]
    assert plan["notes"][2:] == ["busy again", "of the making"]
    assert plan["planned_anew"] == 2


def test_checkpoints_that_were_left_in_what_was_set_aside_go_with_the_next_make(tmp_path: Path) -> None:
    left = tmp_path / SET_ASIDE / "B0-1" / "checkpoint" / "00000005"
    left.mkdir(parents=True)
    (tmp_path / SET_ASIDE / "B0-1" / "log.txt").write_text("x")
    tidy(tmp_path)
    assert [path.name for path in (tmp_path / SET_ASIDE / "B0-1").iterdir()] == ["log.txt"]
