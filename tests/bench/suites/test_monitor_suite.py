"""The suites of the recorder and the monitor: every mode is timed in every round."""

from pathlib import Path

import pytest

from bench import observed_step
from bench.observed_step import ObservedShape
from bench.suites import monitor, recorder
from tests.bench.sessions import run_small


@pytest.mark.usefixtures("workers_here")
@pytest.mark.parametrize("module", [recorder, monitor])
def test_every_mode_is_timed_in_every_round_and_changes_no_number(
    module: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(observed_step, "SHAPES", (ObservedShape("small", 2, 2, 16, 8, 2),))
    (result,) = run_small(module.SUITE, tmp_path, monkeypatch, rounds=2)["shapes"]  # type: ignore[attr-defined]
    modes = module.MODES  # type: ignore[attr-defined]
    assert [sample["case"] for sample in result["samples"]] == [mode.name for mode in modes] * 2
    assert all(sample["wall"] > 0 for sample in result["samples"])
    assert result["differing"] == []
    assert capsys.readouterr().out.count("equal") == len(modes)
