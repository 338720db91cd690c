"""Test the first line of `make`: the study's scale and the reason for it."""

from pathlib import Path

import pytest

from configuration import commands
from scripts import study
from scripts.dev import setup
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
    ("detected", "defconfig", "scale", "at_setup"),
    [
        (
            "cpu",
            "gpt2-ra-ablation",
            "CPU study (no GPU was found when .config was made, so it is scaled to one): mini model",
            "no GPU: .config is scaled to a CPU study\n",
        ),
        (
            "cpu",
            "gpt2-ra-ablation+cpu",
            "CPU study (no GPU was found when .config was made, so it is scaled to one): mini model",
            "no GPU: .config is scaled to a CPU study\n",
        ),
        (
            "w7900",
            "gpt2-ra-ablation+cpu",
            "CPU study (CONFIG_TARGET_CPU=y, although AMD Radeon PRO W7900 48 GB was found when .config was made): "
            "mini model",
            "CPU chosen: .config is scaled to a CPU study\n",
        ),
        ("w7900", "gpt2-ra-ablation", "GPT-2 124m", ""),
        ("cpu", "gpt2-ra-ablation+w7900", "GPT-2 124m", ""),
    ],
)
def test_the_first_line_distinguishes_a_chosen_cpu_from_a_machine_without_a_gpu(
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    detected: str,
    defconfig: str,
    scale: str,
    at_setup: str,
) -> None:
    monkeypatch.setenv("RA_DETECTED", detected)
    commands.main(["defconfig", defconfig])
    _, config, settings = study.load()
    assert study.first_line(config, settings).startswith(f"{settings.name}: {scale}, ")
    capsys.readouterr()
    setup.say_scale()
    assert capsys.readouterr().out == at_setup
