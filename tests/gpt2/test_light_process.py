"""A training process loads no package that it does not need, and its numbers do not depend on that."""

import importlib
import subprocess
import sys
from pathlib import Path

from tests.small_runs import configuration, outcome, same, start

HEAVY = {
    "datasets",
    "wandb",
    "transformers",
    "plotly",
    "pyarrow",
    "torch._dynamo",
    "sympy",
    "scipy",
}
TRAIN = f"""
import sys
from pathlib import Path
import torch
from gpt2 import dataset
from ra.admission import batches
from study.planning import micro_batch
from study import hellaswag_scores, plan_file
from study import worker
from torch.optim.optimizer import register_optimizer_step_post_hook
from tests.small_runs import StopAfter, configuration, start, write_texts

torch.set_num_threads(1)
steps = []
register_optimizer_step_post_hook(lambda *arguments: steps.append(arguments))
folder = Path(sys.argv[1])
config = configuration(write_texts(folder / "texts"), 4)
dataset.prepare(config.data, report=lambda line: None)
assert start(folder / "B0", config, stop=StopAfter(4)).train() == "interrupted"
assert start(folder / "B0", config).train() == "finished"
assert len(steps) == 4
print(*({HEAVY} & set(sys.modules)))
"""


def test_a_training_process_loads_no_heavy_package_and_has_the_numbers_of_one_that_does(
    tmp_path: Path, one_thread: None
) -> None:
    done = subprocess.run([sys.executable, "-c", TRAIN, tmp_path], capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, ""), done.stderr
    importlib.import_module("torch._dynamo")
    start(tmp_path / "loaded" / "B0", configuration(tmp_path / "texts", 4)).train()
    assert same(outcome(tmp_path / "loaded" / "B0"), outcome(tmp_path / "B0"))
