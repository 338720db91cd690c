"""A training process loads no package that it does not need."""

import subprocess
import sys
from pathlib import Path

HEAVY = {"datasets", "wandb", "transformers", "plotly", "trackio", "pyarrow"}
TRAIN = f"""
import sys
from pathlib import Path
from gpt2.data import dataset
from study.runner import worker
from tests.small_runs import configuration, start, write_texts

folder = Path(sys.argv[1])
config = configuration(write_texts(folder / "texts"), 2)
dataset.prepare(config.data, report=lambda line: None)
start(folder / "B0", config).train()
print(*({HEAVY} & set(sys.modules)))
"""


def test_no_heavy_package_is_loaded_by_a_training_process(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", TRAIN, tmp_path], capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, ""), done.stderr
