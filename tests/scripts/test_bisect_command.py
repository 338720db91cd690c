"""`make bisect` names the module, the phase, the settings or the step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime import run_record
from runtime.errors import UserError
from scripts import bisect as command
from tests import small_runs
from tests.scripts.faulty_runs import HALF, SPIKE, train, workplace


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with workplace(tmp_path_factory.mktemp("place"), half=HALF) as folder:
        yield folder


@pytest.fixture(scope="module")
def overflowing(place: Path) -> Path:
    return train("HALF", "half")


def bisect(monkeypatch: pytest.MonkeyPatch, **given: Any) -> dict[str, Any]:
    words = [f"--{name}={value}" for name, value in given.items()]
    monkeypatch.setattr("sys.argv", ["scripts.bisect", *words])
    assert command.main() == 0
    run = Path(given["run"])
    folder = Path(given.get("out", run.parents[1] / "bisect" / run.name))
    found: dict[str, Any] = json.loads((folder / "bisect.json").read_text())
    return found


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_module_in_half_precision_is_named(
    overflowing: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(overflowing)
    assert run_record.load(overflowing).status == "failed"
    found = bisect(monkeypatch, run=overflowing)
    assert (found["symptom"], found["steps"]) == ("nan", 4)
    assert found["found"] == ["upcast:blocks.1.attention"]
    assert len(found["tried"]) <= 13  # 17 parts
    printed = capsys.readouterr().out
    assert 'next: CONFIG_NUMERICS_FIX="upcast:blocks.1.attention"' in printed
    assert content(overflowing) == before


def test_a_spike_is_replayed_from_the_checkpoint_before_it(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "custom/cancelling.py").write_text(SPIKE)
    settings = {"GPT2_MAX_ITERS": "22", "EVAL_INTERVAL_TOKENS": "0", "LEARNING_RATE": "1e-2"}
    train("CANCELLING", "spike", small_runs.StopAfter(18), **settings)
    run = train("CANCELLING", "spike", small_runs.StopAfter(6), **settings)
    assert [spike.iteration for spike in run_record.load(run).spikes] == [20]
    found = bisect(monkeypatch, run=run)
    assert found["symptom"] == "spike"
    assert 10 < found["start"] < 20
    assert found["found"] == ["upcast:blocks.1.attention"]


def test_the_module_of_a_difference_from_another_run_is_named(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "custom/shifted.py").write_text(HALF.replace("2e4 / y", "2e4 / 1.001 / y").replace("140", "14"))
    first, second = train("SHIFTED", "first"), train("B", "second")
    found = bisect(monkeypatch, run=first, against=second)
    assert (found["symptom"], found["steps"]) == ("differs", 4)
    with pytest.raises(UserError, match="B0 shows no differs"):
        bisect(monkeypatch, run=second, against=second, symptom="differs")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"run": "nowhere"}, "RUN=nowhere is not a run folder"),
        ({"step": "3"}, "HALF0 shows no symptom: every step is finite, without a spike at step 3; fix: compare it"),
        ({"symptom": "differs"}, "SYMPTOM=differs needs another run"),
        ({"out": "INSIDE"}, "is in the run's folder"),
    ],
)  # fmt: skip
def test_a_wrong_variable_is_one_line(
    given: dict[str, str], message: str, overflowing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        name: str(overflowing / "bisect") if value == "INSIDE" else value for name, value in given.items()
    }
    with pytest.raises(UserError) as caught:
        bisect(monkeypatch, **({"run": str(overflowing)} | given))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
