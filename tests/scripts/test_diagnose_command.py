"""`make diagnose`: from two run folders to the operation that differs, and run folders that cannot be used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch.nn import functional as F

from runtime.errors import UserError
from scripts import diagnose as command
from scripts import record as recording
from tests.scripts.test_record_command import place, train  # noqa: F401


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


def test_from_two_run_folders_to_the_records_of_the_step_that_differs(
    runs: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right, wrong = runs[:2]
    before = [sorted(run.iterdir()) for run in runs]
    assert diagnose(monkeypatch, right, wrong) == 0
    printed = capsys.readouterr().out
    found = results(right, wrong)
    step = found["record_step"]
    assert ("first beyond rounding", f"step {step}") in [(row["call"], row["place"]) for row in found["rows"]]
    records = [f"{run.parents[1]}/records/B0/step{step}" for run in (right, wrong)]
    commands = [f"make record RUN={run} STEP={step}" for run in (right, wrong)]
    assert found["next"] == [*commands, f"make compare-records A={records[1]} B={records[0]}"]
    assert all(f"next: {command}\n" in printed for command in found["next"])
    for run in (right, wrong):
        with monkeypatch.context() as patch:
            if run == wrong:
                exact_gelu(patch)
            patch.setattr("sys.argv", ["scripts.record", f"--run={run}", f"--step={step}"])
            assert recording.main() == 0
    assert all(Path(folder).is_dir() for folder in records)
    assert [sorted(run.iterdir()) for run in runs] == before


def test_fatal_settings_come_before_records(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for other in runs[3:]:
        diagnose(monkeypatch, runs[0], other)
        found = results(runs[0], other)
        assert len(found["next"]) == 1
        assert "diff " in found["next"][0]
        settings = [row["call"] for row in found["rows"] if row["evidence"] == "setting"]
        assert {"run.variant", "fingerprint.schedule"} & {*settings}


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["B0"], "names 1 runs"),
        (["B0", "study"], "is a study"),
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
    with pytest.raises(UserError, match=message):
        diagnose(monkeypatch, *(tmp_path / path for path in paths), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
