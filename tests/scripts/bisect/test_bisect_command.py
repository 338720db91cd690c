"""`make bisect` names the module, the phase, the settings or the step, and continues after a kill."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpt2.artifacts import run_record
from gpt2.system.errors import UserError
from scripts.bisect import __main__ as command
from scripts.bisect import play
from tests import small_runs
from tests.scripts.bisect.faulty_runs import HALF, SPIKE, train, workplace


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
    assert (folder / "bisect.html").exists()
    found: dict[str, Any] = json.loads((folder / "bisect.json").read_text())
    assert f"# Bisection of {found['run']}" in (folder / "bisect.md").read_text()
    return found


def result(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in found["results"] if one["name"] == name)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_module_in_half_precision_is_named(
    overflowing: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(overflowing)
    assert run_record.load(overflowing).status == "failed"
    found = bisect(monkeypatch, run=overflowing)
    assert found["symptom"] == {
        "kind": "nan", "step": 4, "text": "the loss or gradient norm of step 4 is not finite"
    }  # fmt: skip
    assert result(found, "phases")["found"] == ["forward"]
    modules = result(found, "modules")
    assert modules["found"] == ["upcast:blocks.1.attention"]
    assert modules["replays"] <= 8  # 12 modules
    printed = capsys.readouterr().out
    assert 'next: CONFIG_NUMERICS_FIX="upcast:blocks.1.attention"' in printed
    assert content(overflowing) == before
    again = bisect(monkeypatch, run=overflowing)
    assert again["replays"]["computed"] == 0
    assert again["results"][0]["found"] == found["results"][0]["found"]


def test_the_fix_that_is_named_trains_the_run(overflowing: Path) -> None:
    fixed = train("HALF", "fixed", NUMERICS_FIX="upcast:blocks.1.attention")
    assert run_record.load(fixed).status == "finished"


def test_a_killed_bisection_continues(
    overflowing: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    played, count = play.Player.play, 0

    def kill(*args: Any, **options: Any) -> play.Played:
        nonlocal count
        count += 1
        if count > 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return played(*args, **options)

    given = {"run": overflowing, "out": tmp_path / "out", "over": "modules"}
    child = os.fork()
    if not child:
        monkeypatch.setattr(play.Player, "play", kill)
        bisect(monkeypatch, **given)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not (tmp_path / "out/bisect.json").exists()
    (journal,) = (tmp_path / "out").glob("journal-*.jsonl")
    assert len(journal.read_text().splitlines()) == 1 + 3
    found = bisect(monkeypatch, **given)
    assert result(found, "modules")["found"] == ["upcast:blocks.1.attention"]
    lines = journal.read_text().splitlines()
    assert found["replays"]["computed"] == len(lines) - 1 - 3


def test_a_fix_that_cannot_be_computed_is_a_row(
    overflowing: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("No available kernel.\nAborting execution.")

    monkeypatch.setattr("numerics.search.fixed_modules.FixedModule.run", fail)
    found = bisect(monkeypatch, run=overflowing, out=tmp_path, over="modules")
    modules = result(found, "modules")
    message = "not possible: the fixed step fails: No available kernel. Aborting execution."
    assert [row[1] for row in modules["rows"]] == [message, message]
    assert modules["found"] == []


def test_a_spike_is_replayed_from_the_checkpoint_before_it(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "custom/cancelling.py").write_text(SPIKE)
    settings = {"GPT2_MAX_ITERS": "22", "EVAL_INTERVAL_TOKENS": "0", "LEARNING_RATE": "1e-2"}
    train("CANCELLING", "spike", small_runs.StopAfter(18), **settings)
    run = train("CANCELLING", "spike", small_runs.StopAfter(6), **settings)
    assert [spike.iteration for spike in run_record.load(run).spikes] == [20]
    found = bisect(monkeypatch, run=run, over="modules phases")
    assert found["symptom"]["kind"] == "spike"
    printed = capsys.readouterr().out
    start = int(printed.partition("steps from the checkpoint at ")[2].split()[0])
    assert 10 < start < 20, printed
    assert result(found, "modules")["found"] == ["upcast:blocks.1.attention"]
    assert result(found, "phases")["found"] == ["forward or backward"]


def test_settings_that_together_give_the_symptom(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two is harmless: a weight decay of 10 at a small rate, a large rate without weight decay."""
    wrong = train("B", "wrong", GPT2_MAX_ITERS="30", LEARNING_RATE="1", WEIGHT_DECAY="10", ADAM_BETA1="0.8")
    right = train("B", "right", GPT2_MAX_ITERS="30", LEARNING_RATE="1e-3", WEIGHT_DECAY="0.1")
    assert run_record.load(wrong).status == "failed"
    found = bisect(monkeypatch, run=wrong, against=right, symptom="nan")
    settings = result(found, "settings")
    assert settings["found"] == ["CONFIG_LEARNING_RATE", "CONFIG_WEIGHT_DECAY"]
    assert [row[0] for row in settings["rows"]] == [
        "CONFIG_ADAM_BETA1", "CONFIG_LEARNING_RATE", "CONFIG_WEIGHT_DECAY"
    ]  # fmt: skip
    assert [one["name"] for one in found["results"]] == ["settings"]  # explained


def test_the_first_step_of_another_state_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault acts in step 4, on the losses; the state differs after it."""
    (place / "custom/shifted.py").write_text(HALF.replace("2e4 / y", "1e4 / y").replace("140", "14"))
    first, second = train("SHIFTED", "first"), train("B", "second")
    found = bisect(monkeypatch, run=first, against=second, over="steps settings")
    assert found["symptom"]["kind"] == "differs"
    assert found["symptom"]["step"] == 4
    assert result(found, "steps")["found"] == ["step 4"]
    assert result(found, "settings")["found"] == ["variant"]


def test_the_first_step_is_found_behind_checkpoints_that_differ_already(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both runs have a checkpoint at step 5. The state differs from step 4 on, the losses beyond rounding as well."""
    (place / "custom/earlier.py").write_text(HALF.replace("2e4 / y", "1e4 / y").replace("140", "14"))
    runs = []
    for arm, study in (("EARLIER", "third"), ("B", "fourth")):
        train(arm, study, small_runs.StopAfter(6))
        assert list(Path(f"results/{study}/runs/{arm}0/checkpoint").glob("*5*")), study
        runs.append(Path(f"results/{study}/runs/{arm}0"))
        kept = Path(f"results/{study}/kept")
        shutil.copytree(runs[-1] / "checkpoint", kept)
        train(arm, study)
        shutil.copytree(kept, runs[-1] / "checkpoint", dirs_exist_ok=True)
    found = bisect(monkeypatch, run=runs[0], against=runs[1], over="steps", step=6)
    assert "the checkpoints at 5 differ already: from the initial weights" in capsys.readouterr().out
    assert result(found, "steps")["found"] == ["step 4"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"run": ""}, "RUN is missing; fix: make bisect RUN="),
        ({"run": "nowhere"}, "RUN=nowhere is not a run folder"),
        ({"against": "nowhere"}, "AGAINST=nowhere is not a run folder"),
        ({"step": "0"}, "STEP=0 is not a step number"),
        (
            {"step": "3"},
            "HALF0 shows no step that is not finite and no loss spike at step 3; fix: compare it with another run: ",
        ),
        ({"symptom": "slow"}, "SYMPTOM=slow is unknown; fix: use nan, spike, differs"),
        ({"symptom": "differs"}, "SYMPTOM=differs needs another run"),
        (
            {"symptom": "spike"},
            "HALF0 shows no symptom: a loss spike; fix: compare it with another run: make bisect RUN=",
        ),
        ({"over": "moon"}, "OVER=moon is unknown; fix: use settings, steps, phases, modules"),
        ({"out": "INSIDE"}, "is in the run's folder"),
    ],
)
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
