"""`make diagnose` of runs with monitor files: spikes and NaN name a tensor."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from numerics.diagnose.loss_files import read_curve
from scripts.diagnose.__main__ import diagnose_runs
from scripts.diagnose.runs import REQUIRED, RunSide
from tests.numerics.trend.monitor_files import names, noisy, write_losses, write_monitor

STEPS = 200


def side(
    folder: Path, spikes: tuple[int, ...] = (), broken: int | None = None, watched: bool = True
) -> RunSide:
    """A run whose loss has spikes two steps after those of one tensor's gradient, or a NaN."""
    norms = noisy(8, STEPS)
    losses = 3 + 0.02 * np.random.default_rng(1).standard_normal(STEPS)
    for step in spikes:
        norms[2, step - 1] *= 300
        losses[step + 1 : step + 3] += 2
    if broken:
        norms[5, broken - 1 :] = np.nan
        losses[broken:] = np.nan
    write_losses(
        folder, np.nan_to_num(losses, nan=1e9).tolist(), np.sqrt(np.nansum(norms**2, axis=0)).tolist()
    )
    text = (folder / "metrics.jsonl").read_text().replace("1000000000.0", "NaN")
    (folder / "metrics.jsonl").write_text(text)
    if watched:
        write_monitor(folder, norms)
    parts: dict[str, Any] = dict.fromkeys((*REQUIRED, "error", "hellaswag", "choice"))
    record = SimpleNamespace(status="finished", **parts)
    return RunSide(folder, folder.name, read_curve(folder), cast("Any", record))


def test_spikes_are_attributed(tmp_path: Path) -> None:
    runs = [side(tmp_path / "good"), side(tmp_path / "bad", (80, 120, 150, 180))]
    assert diagnose_runs(runs, tmp_path / "out") == 0
    found = json.loads((tmp_path / "out/diagnose.json").read_text())
    assert found["symptom"] == "spikes"
    assert f"{names()[2]}" in json.dumps(found["rows"])


def test_nan_of_the_only_watched_run_is_attributed(tmp_path: Path) -> None:
    runs = [side(tmp_path / "good", watched=False), side(tmp_path / "bad", broken=150)]
    diagnose_runs(runs, tmp_path / "out")
    found = json.loads((tmp_path / "out/diagnose.json").read_text())
    assert found["symptom"] == "overflow or NaN"
    assert "only bad has monitor files" in found["notes"]
    assert names()[5] in json.dumps(found["rows"])


def test_monitor_files_that_cannot_be_used_stop_no_diagnosis(tmp_path: Path) -> None:
    runs = [side(tmp_path / "good"), side(tmp_path / "bad", (80, 120, 150, 180))]
    for file in (tmp_path / "bad/monitor/rank0").iterdir():
        file.write_text("no table\n")
    assert diagnose_runs(runs, tmp_path / "out") == 0
    found = json.loads((tmp_path / "out/diagnose.json").read_text())
    assert any("cannot be used" in note for note in found["notes"])
