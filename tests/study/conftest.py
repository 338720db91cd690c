"""What several tests of studies begin with."""

from pathlib import Path

import pytest

from gpt2.config import Config, load_config
from scripts import kconfig


@pytest.fixture
def a100_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """The study as it is configured for an A100, in a folder that is the working directory of the test."""
    for part in ("Kconfig", "gpt2", "ra", "study", "defconfigs"):
        (tmp_path / part).symlink_to(Path(__file__).parents[2] / part)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RA_DETECTED", "a100-40g")
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    kconfig.main(["defconfig", "gpt2-ra-ablation"])
    return load_config(".config")
