import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import numpy as np
import torch

from gpt2.artifacts import provenance, run_record
from gpt2.artifacts.equivalent_code import module_digest

SCHEMA = json.loads(Path(run_record.__file__).with_name("run.schema.json").read_text())
ROOT = Path(run_record.__file__).parents[2]


def test_the_environment_has_every_key_of_the_schema() -> None:
    found = provenance.environment_record({})
    value = run_record.blank("B0", "B", 0).to_json() | {"environment": found.to_json()}
    assert set(value["environment"]) == set(SCHEMA["properties"]["environment"]["properties"])
    jsonschema.Draft202012Validator(SCHEMA).validate(value)
    assert (found.numpy, found.threads) == (np.__version__, torch.get_num_threads())


def test_a_record_without_an_environment_is_read() -> None:
    value = run_record.blank("B0", "B", 0).to_json()
    del value["environment"]
    assert run_record.from_json(value).environment is None
    assert "environment" not in SCHEMA["required"]


def test_only_environment_variables_that_change_numbers_are_recorded() -> None:
    given = {"NVIDIA_TF32_OVERRIDE": "0", "API_TOKEN": "secret", "OMP_NUM_THREADS": "2"}
    assert provenance.environment_record(given).variables == {
        "NVIDIA_TF32_OVERRIDE": "0",
        "OMP_NUM_THREADS": "2",
    }


def test_the_recorded_code_covers_the_loaded_modules_of_the_project_alone() -> None:
    code = provenance.loaded_code()
    source = (ROOT / "gpt2" / "artifacts" / "provenance.py").read_bytes()
    assert module_digest(source) == code["gpt2.artifacts.provenance"]
    assert not {name for name in code if name.split(".")[0] in ("torch", "numpy", "json")}


def test_importing_the_names_of_the_variables_loads_no_torch() -> None:
    code = "import sys, gpt2.artifacts.provenance; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
