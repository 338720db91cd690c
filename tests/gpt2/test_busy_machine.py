"""Test that the load of the machine changes no number of a run."""

from pathlib import Path
from typing import Any

import pytest
import torch

from runtime import run_record
from tests import small_runs
from tests.busy_machine import other_work


@pytest.mark.parametrize("threads", [1, 2])
def test_a_run_has_the_same_losses_on_an_idle_and_on_a_loaded_machine(
    tmp_path: Path, texts: Path, one_thread: None, threads: int
) -> None:
    torch.set_num_threads(threads)  # one_thread restores the number
    config = small_runs.configuration(texts, 4, seconds=1)

    def losses(name: str) -> list[Any]:
        assert small_runs.start(tmp_path / name, config).train() == "finished"
        record = run_record.load(tmp_path / name)
        assert record.schedule
        assert record.validation
        assert (record.schedule.iterations, record.schedule.cut) == (4, False)
        return [[tokens, loss] for tokens, _, loss in record.validation.history]

    idle = losses("idle")
    with other_work(4):
        assert losses("loaded") == idle
