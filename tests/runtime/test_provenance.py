import hashlib
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from runtime import provenance, run_record


def test_the_environment_has_every_key_of_the_schema() -> None:
    found = provenance.environment_record({})
    value = run_record.blank("B0", "B", 0).to_json() | {"environment": found.to_json()}
    assert run_record.from_json(value).environment == found
    assert (found.numpy, found.threads) == (np.__version__, torch.get_num_threads())


def test_only_environment_variables_that_change_numbers_are_recorded() -> None:
    given = {"NVIDIA_TF32_OVERRIDE": "0", "API_TOKEN": "secret", "OMP_NUM_THREADS": "2"}
    assert provenance.environment_record(given).variables == {"NVIDIA_TF32_OVERRIDE": "0"}


def test_the_recorded_code_is_that_of_loaded_custom_variants_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "mine.py"
    source.write_text("FACTOR = 1\n")
    module = types.ModuleType("ra.custom.mine")
    module.__file__ = str(source)
    for name in [name for name in sys.modules if name.startswith("ra.custom.")]:  # loaded by other tests
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ra.custom.mine", module)
    before = provenance.environment_record({}).code
    assert before == {"ra.custom.mine": hashlib.sha256(source.read_bytes()).hexdigest()[:16]}
    source.write_text("FACTOR = 2\n")
    assert provenance.environment_record({}).code != before
