"""`make trend`: folders of runs, the folder of results, the next command, and what cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from runtime.errors import UserError
from scripts import trend as command
from tests.referee.numerics.trend.monitor_files import names, noisy, write_losses, write_monitor


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A clean run, one with a wrong step, and one without monitor files."""
    monkeypatch.chdir(tmp_path)
    found = [Path(f"results/{name}/runs/B0") for name in ("a", "b", "c")]
    for run in found:
        norms = noisy(8, 120)
        if run.parts[1] == "b":
            norms[3, 99] *= 200
        if run.parts[1] != "c":
            write_monitor(run, norms)
        write_losses(run, [2.0] * 120, np.sqrt(np.square(norms).sum(axis=0)).tolist())
        (run / "run.json").write_text("{}")
    return found


def trend(patch: pytest.MonkeyPatch, *runs: Path, out: Path | None = None) -> int:
    options = [f"--out={out}"] if out else []
    patch.setattr("sys.argv", ["scripts.trend", *options, *map(str, runs)])
    return command.main()


def test_a_run_and_two_runs(
    runs: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trend(monkeypatch, runs[1]) == 0
    assert f"next: make record RUN={runs[1]} STEP=100\n" in capsys.readouterr().out
    found = json.loads(Path("results/trend-b-runs-B0/trend.json").read_text())
    assert (found["rows"][0]["call"], found["rows"][0]["place"]) == (f"grad_reduced {names()[3]}", "step 100")
    assert found["steps"] == 120
    assert Path("results/trend-b-runs-B0/trend.html").exists()
    assert trend(monkeypatch, *runs[:2]) == 0
    assert capsys.readouterr().out.count("next: make record RUN=results/") == 2
    assert Path("results/trend-a-runs-B0-b-runs-B0/trend.json").exists()
    assert trend(monkeypatch, runs[0], out=Path("new/place")) == 0
    assert capsys.readouterr().out.endswith("next: nothing\n")


def test_what_cannot_be_used_is_one_line(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        ([], "names 0 runs"),
        (runs, "names 3 runs"),
        ([runs[0], runs[0]], "named twice"),
        ([Path("absent")], "does not exist"),
        ([Path("results/a")], "is a study"),
        ([runs[2]], "CONFIG_MONITOR=y"),
    ]
    for paths, message in cases:
        with pytest.raises(UserError, match=message):
            trend(monkeypatch, *paths)
    for folder in (runs[1], Path("results/a")):
        with pytest.raises(UserError, match="name another folder"):
            trend(monkeypatch, runs[0], out=folder)
