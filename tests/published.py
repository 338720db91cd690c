"""Published files that are too large for the repository. A test of a missing file is skipped."""

import os
from pathlib import Path

import pytest

VARIABLE = "RA_TEST_DATA"  # a folder with hellaswag/hellaswag_val.jsonl and gpt2_bpe/encoder.json
BESIDE_THE_CHECKOUT = Path(__file__).parents[2] / "shared/data"


def published(name: str) -> Path:
    """The file of that name, a path in the folder."""
    path = Path(os.environ.get(VARIABLE) or BESIDE_THE_CHECKOUT) / name
    if not path.is_file():
        pytest.skip(f"{name} is not here; {VARIABLE}=FOLDER names the folder that holds it")
    return path
