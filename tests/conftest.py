"""What all tests share."""

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # how long an example takes is the machine's doing
settings.load_profile("untimed")


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty working folder for .config, on a machine where only a CPU is seen."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RA_DETECTED", "cpu")
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    return tmp_path
