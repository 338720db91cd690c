"""`make transfer`: every run on every platform, resumable, judged, with its page; and what is refused."""

import json
import shutil
from pathlib import Path

import pytest

from runtime import run_record
from tests.faults.in_process import train
from tests.faults.workplace import Workplace, write_stories

SETTINGS = {
    "VARIANTS": "B B+AQN=strong",
    "SEEDS": "3",
    "GPT2_MAX_ITERS": "6",
    "MICRO_BATCH": "0",
    "EVAL_INTERVAL_TOKENS": "64",
}
PLATFORMS = "int8 foreign:0 foreign:0.2"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    texts = write_stories(tmp_path_factory.mktemp("texts"))
    place = Workplace(tmp_path_factory.mktemp("place"), texts, **SETTINGS)
    done = train(place)
    assert done.returncode == 0, done.stdout
    return place


def transfer(place: Workplace, *arguments: str) -> tuple[int, str]:
    done = place.here("scripts.transfer", *arguments)
    return done.returncode, done.stdout


def test_every_run_is_evaluated_judged_and_shown_and_nothing_is_repeated(place: Workplace) -> None:
    status, printed = transfer(place, str(place.study), "--platforms", PLATFORMS)
    assert status == 0, printed
    content = json.loads((place.study / "transfer.json").read_text())
    names = ["fp32", *PLATFORMS.split()]
    losses = [row for row in content["matrix"] if row["metric"] == "loss"]
    rows = {(row["arm"], row["seed"], row["platform"]): row["value"] for row in losses}
    assert len(rows) == len(losses) == 6 * len(names)
    assert all(rows[arm, seed, "foreign:0"] == rows[arm, seed, "fp32"] for arm, seed, _ in rows)
    gaps = {one["platform"]: one for one in content["verdicts"]["gaps"]}
    assert set(gaps) == set(names[1:])
    assert gaps["foreign:0"]["word"] == "no gap"
    assert all(one["platform"] != "foreign:0" for one in content["verdicts"]["shrinks"])
    assert [one["arm"] for one in content["verdicts"]["costs"]] == ["B+AQN=strong"]
    assert "foreign:0: no gap" in printed
    for name in ("transfer.html", "transfer.md"):
        assert "B+AQN=strong" in (place.study / name).read_text()
    records = {path: path.stat().st_mtime_ns for path in place.study.glob("runs/*/evaluations/*/rows.jsonl")}
    assert len(records) == len(rows)
    assert transfer(place, str(place.study), "--platforms", PLATFORMS)[0] == 0
    assert {path: path.stat().st_mtime_ns for path in records} == records


def test_an_arm_with_a_diverged_run_is_counted_as_that_and_not_judged(
    place: Workplace, tmp_path: Path
) -> None:
    study = shutil.copytree(place.study, tmp_path / "diverged")
    error = "NotFiniteError: iteration 7: loss nan, gradient norm nan"
    run_dir = study / "runs/B+AQN=strong.1"
    run_record.write(run_dir, run_record.load(run_dir).replace(status="failed", error=error))
    status, printed = transfer(place, str(study), "--platforms", "foreign:0.2")
    assert status == 0, printed
    assert "- B+AQN=strong: seed 1 diverged; in no mean, not judged." in printed
    content = json.loads((study / "transfer.json").read_text())
    assert content["diverged"] == {"B+AQN=strong": [1]}
    assert content["verdicts"]["costs"] == content["verdicts"]["shrinks"] == []
    assert len(content["verdicts"]["gaps"]) == 1
    runs = {(row["arm"], row["seed"]) for row in content["matrix"]}
    assert runs == {("B", 0), ("B", 1), ("B", 2), ("B+AQN=strong", 0), ("B+AQN=strong", 2)}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere", "--platforms", "int8"], "nowhere is not a study; fix: STUDIES="),
        (["STUDY", "COPY", "--platforms", "int8"], "is in two studies; fix: name studies of different arms"),
        (["EMPTY", "--platforms", "int8"], "has no finished run; fix: run `make`"),
    ],
)
def test_an_unusable_request_is_refused_in_one_line(
    place: Workplace, tmp_path: Path, arguments: list[str], says: str
) -> None:
    (tmp_path / "empty/runs").mkdir(parents=True)
    shutil.copytree(place.study, tmp_path / "copy")
    known = {name.upper(): str(tmp_path / name) for name in ("copy", "empty")}
    known["STUDY"] = str(place.study)
    status, printed = transfer(place, *(known.get(word, word) for word in arguments))
    assert status
    (error,) = [line for line in printed.splitlines() if line.startswith("error:")]
    assert says in error
