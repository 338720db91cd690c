"""Five short runs compute the stored losses: to the bit on the processor and torch that stored them.

Another processor or torch may sum in another order. A change that is meant to compute other numbers raises NUMBERS and
stores the runs: python -m tests.gpt2.test_stored_runs
"""

import dataclasses
import json
import tempfile
from pathlib import Path

import pytest
import torch

from gpt2.fingerprint import NUMBERS
from runtime.detected_hardware import cpu_name
from runtime.files import write_json
from runtime.settings import Config
from tests import small_runs

FILE = Path(__file__).parents[1] / "fixtures" / "stored_runs.json"
ITERATIONS = 8
RATE = 5e-2  # so large that the arms differ by more than ROUNDING
ROUNDING = 1e-6  # relative, of another processor or torch
MODIFIED = "GATED+NORM=rms+MLP=swiglu+POSITION=rotary"
NOISY = "RAALL+AQN=mild"
NAMES = ("B", "RAALL", "RALEARN", MODIFIED, NOISY)


def configuration(name: str, texts: Path) -> Config:
    """Return the settings of a run: dropout with the modifiers, and the schedule WSD with the noise."""
    config = small_runs.configuration(
        texts,
        ITERATIONS,
        dropout=0.1 if name == MODIFIED else 0.0,
        schedule=("wsd", 0.3) if name == NOISY else small_runs.SCHEDULE,
    )
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, learning_rate=RATE))


def losses(name: str, folder: Path, texts: Path) -> dict[str, list[float]]:
    """Train a run. Return the loss of each step and of each validation, in nats."""
    small_runs.start(folder, configuration(name, texts), name).train()
    _, record, steps = small_runs.outcome(folder)
    return {"steps": [loss for _, loss in steps], "validations": [loss for _, loss in record["losses"]]}


def machine() -> dict[str, str]:
    return {"processor": cpu_name(), "torch": torch.__version__}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", NAMES)
def test_a_run_computes_the_stored_losses(name: str, tmp_path: Path, texts: Path) -> None:
    stored = json.loads(FILE.read_text())
    rounding = 0.0 if stored["machine"] == machine() else ROUNDING
    for kind, computed in losses(name, tmp_path, texts).items():
        expected = [float.fromhex(loss) for loss in stored["runs"][name][kind]]
        assert computed == pytest.approx(expected, rel=rounding, abs=0.0), kind


def test_the_stored_runs_are_those_of_the_present_numbers_and_differ_from_each_other() -> None:
    stored = json.loads(FILE.read_text())
    assert stored["numbers"] == NUMBERS
    assert list(stored["runs"]) == list(NAMES)
    assert len({tuple(run["steps"]) for run in stored["runs"].values()}) == len(NAMES)


def main() -> None:
    """Train the runs and store their losses with the names of the processor and of torch."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        texts = small_runs.write_texts(Path(folder) / "texts")
        runs = {
            name: {
                kind: [loss.hex() for loss in values]
                for kind, values in losses(name, Path(folder) / f"run{number}", texts).items()
            }
            for number, name in enumerate(NAMES)
        }
    write_json(FILE, {"numbers": NUMBERS, "machine": machine(), "runs": runs})


if __name__ == "__main__":
    main()
