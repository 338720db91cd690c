"""Fixtures of the tests of studies."""

import copy
import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from runtime.settings import Config, load_config
from study import kconfig_commands as commands
from tests.checkout import link_project
from tests.study.compared import a_study
from tests.study.small_study import Place, configuration


@pytest.fixture
def a100_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Return the study configured for an A100, in a folder that is the working directory of the test."""
    link_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RA_DETECTED", "a100-40g")
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    commands.main(["defconfig", "gpt2-ra-ablation"])
    return load_config(".config")


@pytest.fixture(scope="session")
def finished_study(tmp_path_factory: pytest.TempPathFactory, texts: Path) -> Place:
    """Return a study with a finished run of B and of RALEARN. Tests use copies of it: `finished`."""
    place = Place(tmp_path_factory.mktemp("finished"), configuration(texts), ("B", "RALEARN"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    assert [place.run("B"), place.run("RALEARN")] == ["finished", "finished"]
    torch.set_num_threads(before)
    return place


@pytest.fixture
def finished(tmp_path: Path, finished_study: Place) -> Place:
    """Return a copy of the finished study in the folder of the test."""
    place = copy.copy(finished_study)
    place.settings = dataclasses.replace(finished_study.settings, results_dir=tmp_path)
    place.directory = tmp_path / finished_study.directory.name
    shutil.copytree(finished_study.directory, place.directory)
    return place


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study that others are compared with."""
    return a_study(tmp_path_factory.mktemp("studies") / "one")
