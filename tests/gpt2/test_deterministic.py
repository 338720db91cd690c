"""CONFIG_DETERMINISTIC changes no number on a CPU, and is on record. It concerns a process, so it has one."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpt2.initial_weights import weights_digest
from referee.numerics.seed import process_environment
from runtime import attention_kernels, run_record
from tests import small_runs

ROOT = Path(__file__).parents[2]
CODE = """
import json, sys
from pathlib import Path
from tests.gpt2.test_deterministic import trained
print(json.dumps(trained(Path(sys.argv[1]), deterministic=True)))
"""


def trained(folder: Path, deterministic: bool) -> list[object]:
    """Train in this process. Returns the losses, the digest of the weights, and what is on record."""
    config = small_runs.configuration(small_runs.write_texts(folder / "texts"), 3, dropout=0.1)
    target = dataclasses.replace(config.target, deterministic=deterministic)
    attention_kernels.prepare_device(target, config.model)
    run = small_runs.start(folder / "B0", dataclasses.replace(config, target=target), "RALEARN")
    run.train()
    _, _, losses = small_runs.outcome(folder / "B0")
    environment = run_record.load(folder / "B0").environment
    weights = weights_digest(run.stepper.model, 0)
    return [losses, weights, environment.deterministic, environment.variables]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    """Train in a deterministic process, and without the setting in this one."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path_factory.mktemp("runs"))],
        cwd=ROOT,
        env={**os.environ, **process_environment()},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    threads = torch.get_num_threads()
    usual = trained(tmp_path_factory.mktemp("usual"), deterministic=False)
    torch.set_num_threads(threads)
    return {"n": usual, "y": json.loads(done.stdout.splitlines()[-1])}


def test_deterministic_training_has_the_same_numbers_on_a_cpu(outcomes: dict[str, list[object]]) -> None:
    assert outcomes["y"][:2] == outcomes["n"][:2]


def test_deterministic_training_is_on_record(outcomes: dict[str, list[object]]) -> None:
    assert outcomes["n"][2] is False
    assert outcomes["y"][2] is True
    recorded = outcomes["y"][3]
    assert isinstance(recorded, dict)
    assert process_environment().items() <= recorded.items()
