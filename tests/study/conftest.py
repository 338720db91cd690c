"""What several tests of studies begin with."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpt2.config.config import Config, load_config
from kconfig import commands
from tests import small_runs
from tests.study.compared import a_study
from tests.study.extended import Place, configuration


@pytest.fixture
def a100_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """The study as it is configured for an A100, in a folder that is the working directory of the test."""
    for part in ("Kconfig", "gpt2", "ra", "study", "kconfig", "pages", "defconfigs"):
        (tmp_path / part).symlink_to(Path(__file__).parents[2] / part)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RA_DETECTED", "a100-40g")
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    commands.main(["defconfig", "gpt2-ra-ablation"])
    return load_config(".config")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_runs.write_texts(tmp_path_factory.mktemp("runs") / "texts")


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def finished(tmp_path: Path, texts: Path) -> Place:
    place = Place(tmp_path, configuration(texts), ("B", "RALEARN"))
    assert [place.run("B"), place.run("RALEARN")] == ["finished", "finished"]
    return place


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study that others are compared with."""
    return a_study(tmp_path_factory.mktemp("studies") / "one")
