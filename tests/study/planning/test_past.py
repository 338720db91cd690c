"""Finished studies of the planned model and data, and the noise, speed and overhead that they show."""

import math
import os
from pathlib import Path

import pytest

from study.planning.planned_power import find_past_studies, newest_noise
from study.report.report_data import build_report
from tests.checked_files import write_checked
from tests.study.sample_records import STEPS, UPDATE, VARIANTS, a_study, edit

SETTINGS = {
    "GPT2_MODEL_MINI": "y", "GPT2_MODEL_TINY": "n", "DATASET_EMBEDDED": "y", "TOKENIZER_BYTES": "y",
    "GPT2_BLOCK_SIZE": "128", "DATASET_FILES": "", "LEARNING_RATE": "1e-3", "SEEDS": "5",
}  # fmt: skip


def finished_study(
    folder: Path, seeds: int = 4, variants: tuple[str, ...] = VARIANTS, **changed: str
) -> Path:
    """A finished study of SETTINGS with its configuration in every run."""
    a_study(folder, seeds, variants=variants, hellaswag=False)
    lines = []
    for name, value in (SETTINGS | changed).items():
        text = value if value == "y" or value.isdecimal() else f'"{value}"'
        lines.append(f"# CONFIG_{name} is not set" if value == "n" else f"CONFIG_{name}={text}")
    for run in (folder / "runs").iterdir():
        (run / "config").write_text("\n".join(lines) + "\n")
        edit(folder, run.name)  # its checksums have the configuration
    write_checked(folder / "expected.json", {"variants": list(variants), "seeds": seeds})
    return folder


def test_studies_of_another_model_or_data_and_unfinished_ones_are_left_out(tmp_path: Path) -> None:
    study = finished_study(tmp_path / "a")
    finished_study(tmp_path / "tiny", GPT2_MODEL_MINI="n", GPT2_MODEL_TINY="y")
    finished_study(tmp_path / "block", GPT2_BLOCK_SIZE="256")
    edit(finished_study(tmp_path / "unfinished"), "B0", status="running")
    (tmp_path / "memory").mkdir()
    (found,) = find_past_studies(tmp_path, SETTINGS)
    assert (found.directory, found.differing) == (study, ())
    assert find_past_studies(tmp_path / "absent", SETTINGS) == []


def test_the_noise_is_the_floor_of_the_report_and_the_arms_own_spread(tmp_path: Path) -> None:
    past = find_past_studies(tmp_path, SETTINGS | {"SEEDS": "9"}) or []
    assert newest_noise(past) is None
    report = build_report(finished_study(tmp_path / "a"))
    past = find_past_studies(tmp_path, SETTINGS)
    floor, own = newest_noise(past), newest_noise(past, "RALEARN")
    assert floor
    assert own
    assert report.floor
    assert (floor[1].arm, floor[1].control, floor[1].dof) == (
        pytest.approx(report.floor.sigma), pytest.approx(report.floor.sigma), report.floor.dof,
    )  # fmt: skip
    spread = report.verdicts[0].test.spread
    assert spread is not None
    least = report.floor.sigma / math.sqrt(4)  # the spread of the control arms' mean
    assert own[1].spread(4) == pytest.approx(max(spread, least))
    assert own[1].dof == 3


def test_a_study_of_one_control_arm_shows_the_noise_of_the_arms_differences_alone(tmp_path: Path) -> None:
    report = build_report(finished_study(tmp_path / "lean", 7, ("B", "RALEARN")))
    past = find_past_studies(tmp_path, SETTINGS)
    own = newest_noise(past, "RALEARN")
    assert newest_noise(past) is None
    assert own
    assert own[1].spread(1) == pytest.approx(report.verdicts[0].test.spread)
    assert newest_noise(past, "GATED") is None


def test_speed_and_overhead_are_those_of_the_records(tmp_path: Path) -> None:
    finished_study(tmp_path / "a")
    (study,) = find_past_studies(tmp_path, SETTINGS)
    assert study.seconds_per_token() == pytest.approx(STEPS * 10.0 / (STEPS * UPDATE))
    assert study.overhead_seconds() == pytest.approx(
        140.0
    )  # the clocks: the files have the times of this test
    for run in study.directory.glob("runs/*"):
        os.utime(run / "config", (1e9, 1e9))
        os.utime(run / "run.json", (1e9 + STEPS * 10 + 200, 1e9 + STEPS * 10 + 200))
    assert study.overhead_seconds() == pytest.approx(200.0)
