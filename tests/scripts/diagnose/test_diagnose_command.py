"""`make diagnose`: from two run folders to the operation that differs, and run folders that cannot be used."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from gpt2.artifacts.run_record import HellaSwagEntry
from gpt2.system.errors import UserError
from gpt2.train.step import Stepper
from scripts.diagnose import __main__ as command
from scripts.diagnose.runs import read_runs, run_scores
from scripts.record import __main__ as recording
from tests.scripts.record.test_record_command import place, train  # noqa: F401


def exact_gelu(patch: pytest.MonkeyPatch) -> None:
    """The GELU of another model: erf instead of tanh."""
    gelu = F.gelu
    patch.setattr(F, "gelu", lambda x, approximate="none": gelu(x))


@pytest.fixture(scope="module")
def runs(place: Path) -> list[Path]:  # noqa: F811
    """A run; with the other GELU and two threads, as on another machine; with the other GELU; with another seed."""
    settings = {"LEARNING_RATE": "0.05"}
    found = [train("B", **settings)]
    with pytest.MonkeyPatch.context() as patch:
        exact_gelu(patch)
        found += [train("B", CPU_THREADS=2, **settings), train("B", **settings)]
    return [*found, train("RAALL", **settings), train("B", LEARNING_RATE="0.04")]


def diagnose(patch: pytest.MonkeyPatch, *runs: Path, out: Path | None = None) -> int:
    options = [f"--out={out}"] if out else []
    patch.setattr("sys.argv", ["scripts.diagnose", *options, *map(str, runs)])
    return command.main()


def results(*runs: Path) -> Any:
    name = "-".join(["diagnose", *(str(run).replace("results/", "").replace("/", "-") for run in runs)])
    return json.loads((Path("results") / name / "diagnose.json").read_text())


def run_commands(found: Any, wrong: Path) -> None:
    """Run the `make record` commands that a diagnosis names, each on the machine of its run."""
    for item in found["next"]:
        words = shlex.split(item["text"])
        if words[:2] != ["make", "record"]:
            continue
        given = dict(word.split("=", 1) for word in words[2:])
        with pytest.MonkeyPatch.context() as patch:
            if Path(given["RUN"]) == wrong:
                exact_gelu(patch)
            options = [f"--{name.lower()}={value}" for name, value in given.items()]
            patch.setattr("sys.argv", ["scripts.record", *options])
            assert recording.main() == 0


def test_from_two_run_folders_to_the_operation(
    runs: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right, wrong = runs[:2]
    before = [sorted(run.iterdir()) for run in runs]
    assert diagnose(monkeypatch, right, wrong) == 0
    printed = capsys.readouterr().out
    found = results(right, wrong)
    step = found["record_step"]
    assert found["first_beyond_rounding"]["step"] == step
    assert f"next, machine 1 ({str(right).replace('results/', '')}, " in printed
    assert f": make record RUN={wrong} STEP={step}\n" in printed
    assert f"next: make compare-records A={wrong.parents[1]}/records/B0/step{step} B=" in printed
    assert [len(found["next"]), found["cause"]] == [3, None]
    for _ in range(2):  # the weights of step 2 differ, which leads to step 1
        run_commands(results(right, wrong), wrong)
        assert diagnose(monkeypatch, right, wrong) == 0
    printed = capsys.readouterr().out
    first = results(right, wrong)["comparison"]["first_divergence"]
    assert "gelu" in first["name"]
    assert first["module"].startswith("blocks.0.mlp")
    assert f"\nfirst divergence: {first['name']}" in printed
    assert [sorted(run.iterdir()) for run in runs] == before


def test_one_machine_with_the_same_settings_is_not_reproducible(
    runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    right, other = runs[0], runs[2]
    diagnose(monkeypatch, right, other)
    found = results(right, other)
    assert (found["symptom"], found["section"]) == ("not reproducible", "2.3.2")
    assert "TASK=hash" in found["next"][0]["text"]
    run_commands(found, other)
    diagnose(monkeypatch, right, other)
    assert "gelu" in results(right, other)["comparison"]["first_divergence"]["name"]


@pytest.mark.parametrize(("other", "subject"), [(3, "variants"), (4, "LEARNING_RATE")])
def test_other_settings_come_before_records(
    other: int, subject: str, runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diagnose(monkeypatch, runs[0], runs[other], out=tmp_path)
    found = json.loads((tmp_path / "diagnose.json").read_text())
    assert [item["text"] for item in found["next"]] == [f"diff {runs[0]}/config {runs[other]}/config"]
    assert subject in found["flow"][1]["finding"]
    assert [step["state"] for step in found["flow"]] == ["done", "next", "done", "later", "later"]


def test_weights_that_change_between_two_steps_point_to_the_update(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = Stepper.step

    def wrong_update(self: Stepper, ids_ET: torch.Tensor, iteration: int, *rest: Any) -> Any:
        if iteration == 3:
            with torch.no_grad():
                self.model.get_submodule("blocks.1.mlp.fc").weight *= 1.5
        return step(self, ids_ET, iteration, *rest)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "step", wrong_update)
        other = train("B", LEARNING_RATE="0.05")
    for _ in range(3):
        diagnose(monkeypatch, runs[0], other, out=out)
        found = json.loads((out / "diagnose.json").read_text())
        with monkeypatch.context() as patch:
            for item in found["next"]:
                words = shlex.split(item["text"])
                if words[:2] == ["make", "record"]:
                    is_other = f"RUN={other}" in words
                    patch.setattr(Stepper, "step", wrong_update if is_other else step)
                    options = [
                        f"--{word.partition('=')[0].lower()}={word.partition('=')[2]}" for word in words[2:]
                    ]
                    patch.setattr("sys.argv", ["scripts.record", *options])
                    assert recording.main() == 0
    assert "the update of the weights after step 3" in found["cause"]
    assert "first divergence: the update of the weights after step 3" in capsys.readouterr().out


def test_downstream_only_by_hellaswag(runs: list[Path]) -> None:
    sides = read_runs([runs[0], runs[1]])
    for side, accuracy in zip(sides, (0.31, 0.25), strict=True):
        assert side.record
        entry = HellaSwagEntry(None, 0.2, 0.01, accuracy, 0.01, 1000, "f" * 64)
        side.record = dataclasses.replace(side.record, hellaswag=entry, choice=None)
    (score,) = run_scores(sides)
    assert score.differs
    assert score.error == pytest.approx(0.01 * 2**0.5)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["B0"], "names 1 runs"),
        ([], "names 0 runs"),
        (["B0", "B0", "B0"], "names 3 runs"),
        (["B0", "B0"], "named twice"),
        (["B0", "missing"], "does not exist"),
        (["B0", "study"], "is a study"),
        (["B0", "empty"], "without metrics.jsonl"),
        (["B0", "damaged"], "run.json cannot be read: .*fix: restore the run's folder from a copy"),
        (["B0", "no losses"], "no losses"),
    ],
)
def test_bad_input_is_one_line(
    paths: list[str], message: str, runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(runs[0], tmp_path / "B0")
    shutil.copytree(runs[0], tmp_path / "damaged")
    shutil.copytree(runs[1], tmp_path / "no losses")
    (tmp_path / "damaged/run.json").write_text("{")
    (tmp_path / "no losses/metrics.jsonl").unlink()
    (tmp_path / "study/runs/B0").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=message):
        diagnose(monkeypatch, *(tmp_path / path for path in paths), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_or_a_study_is_no_folder_of_results(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (runs[0], runs[0].parents[1]):
        with pytest.raises(UserError, match="name another folder for the results"):
            diagnose(monkeypatch, *runs[:2], out=folder)
