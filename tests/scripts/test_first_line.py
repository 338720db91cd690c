"""Test the first line of `make`: the study's scale and the reason for it."""

from pathlib import Path

import pytest

from scripts import study
from scripts.dev import setup
from study import kconfig_commands as commands
from tests.checkout import link_project

ROOT = Path(__file__).parents[2]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    link_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("detected", "defconfig", "part", "at_setup"),
    [
        ("cpu", "gpt2-ra-ablation", "no GPU was found", "no GPU"),
        ("w7900", "gpt2-ra-ablation+cpu", "CONFIG_TARGET_CPU=y, although AMD Radeon PRO W7900", "CPU chosen"),
        ("cpu", "gpt2-ra-ablation+w7900", "GPT-2 124m", ""),
    ],
)
def test_the_first_line_distinguishes_a_chosen_cpu_from_a_machine_without_a_gpu(
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    detected: str,
    defconfig: str,
    part: str,
    at_setup: str,
) -> None:
    monkeypatch.setenv("RA_DETECTED", detected)
    commands.main(["defconfig", defconfig])
    _, config, settings = study.load()
    assert part in study.first_line(config, settings)
    capsys.readouterr()
    setup.say_scale()
    assert capsys.readouterr().out.partition(":")[0] == at_setup
