"""Fixtures of all tests."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import (
    process_defaults,  # noqa: F401  (before any test loads torch)
    shared_folder,
)

settings.register_profile("untimed", deadline=None)  # the time of an example depends on the machine
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with slow tests first: with several processes, none is left to the last file of another."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session", autouse=True)
def _shared_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.getbasetemp()
    session = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ[shared_folder.VARIABLE] = str(session / "shared")


@pytest.fixture(scope="session", autouse=True)
def _limited_threads() -> Iterator[None]:
    """Give a run of CONFIG_CPU_THREADS=0 in this process OMP_NUM_THREADS threads, where `make check` sets that.

    With one for each core they wait for the cores that other test processes use, in this test and in all later ones.
    """
    limit = os.environ.get("OMP_NUM_THREADS", "")
    with pytest.MonkeyPatch.context() as patch:
        if limit.isdecimal():
            from runtime import attention_kernels

            patch.setattr(attention_kernels, "cpu_threads", lambda requested: requested or int(limit))
        yield


@pytest.fixture(scope="module", autouse=True)
def _no_setting_of_torch_remains() -> Iterator[None]:
    """Fail after a file that leaves a recorder on or attention kernels off, which would change later files.

    A recorder's hooks copy every optimizer step of the process.
    """
    yield
    optimizers = sys.modules.get("torch.optim.optimizer")
    if not optimizers:
        return
    from torch.backends import cuda

    hooks = list(optimizers._global_optimizer_pre_hooks.values())
    optimizers._global_optimizer_pre_hooks.clear()
    optimizers._global_optimizer_post_hooks.clear()
    kernels = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled())
    cuda.enable_flash_sdp(True)
    cuda.enable_mem_efficient_sdp(True)
    cuda.enable_math_sdp(True)
    assert (hooks, kernels) == ([], (True, True, True))


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty working folder for .config, on a machine with a CPU alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RA_DETECTED", "cpu")
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    return tmp_path


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run torch on one thread during the test."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of eighty short stories."""
    from tests import small_runs

    return small_runs.write_texts(tmp_path_factory.mktemp("runs") / "texts")
