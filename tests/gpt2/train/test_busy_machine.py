"""Other work on the machine changes no number of a run."""

from pathlib import Path
from typing import Any

import pytest

from gpt2.artifacts import run_record
from gpt2.config.batch import plan_batch
from gpt2.hardware.resolve import resolve
from gpt2.system.signals import Stop
from gpt2.train.run_plan import RunPlan
from gpt2.train.trainer import Run
from tests import small_runs
from tests.busy_machine import other_work


@pytest.mark.parametrize("threads", [1, 2])
def test_a_run_has_the_same_losses_on_an_idle_and_on_a_loaded_machine(tmp_path: Path, threads: int) -> None:
    import torch

    config = small_runs.configuration(small_runs.write_texts(tmp_path / "texts"), 10, seconds=1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)

    def losses(name: str) -> list[Any]:
        folder = tmp_path / name
        plan = RunPlan(folder, "B0", "B", 0, 10, plan_batch(4, 2, 1, 16))
        assert Run(plan, config, resolve(config.target), None, Stop()).train() == "finished"
        record = run_record.load(folder)
        assert record.schedule
        assert record.validation
        assert (record.schedule.iterations, record.schedule.cut) == (10, False)
        return [[tokens, loss] for tokens, _, loss in record.validation.history]

    try:
        idle = losses("idle")
        with other_work(4):
            assert losses("loaded") == idle
    finally:
        torch.set_num_threads(before)
